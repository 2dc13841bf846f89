"""DataLoader: order, batches, workers, resuming, errors."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from loader_datasets import Dying, Squares

from mithril.graph.errors import InputError, OptionError
from mithril_train.data import DataLoader, permutation
from mithril_train.data.workers import WorkerError


def test_the_order_of_a_seed_never_changes():
    assert permutation(10, seed=1).tolist() == [3, 5, 2, 4, 1, 9, 0, 6, 8, 7]
    assert sorted(permutation(1000, 5, 3).tolist()) == list(range(1000))
    assert (permutation(1000, 5, 3) != permutation(1000, 5, 4)).any()
    assert (permutation(1000, 5, 3) != permutation(1000, 6, 3)).any()


@pytest.mark.parametrize(("workers", "kind"), [(0, "thread"), (3, "thread"), (2, "process")])
def test_batches_come_in_order_whatever_the_workers(workers, kind):
    loader = DataLoader(Squares(10), batch_size=4, shuffle=True, seed=3, num_workers=workers, worker=kind)
    assert len(loader) == 3
    labels = [batch["y"].tolist() for batch in loader]
    order = permutation(10, 3, 0)
    assert labels == [(order[k : k + 4] ** 2).tolist() for k in (0, 4, 8)]
    assert [b["y"].tolist() for b in loader] != labels, "the next epoch has another order"


def test_arrays_tuple_and_drop_last():
    x, y = np.arange(10), np.arange(10) * 2.0
    batches = list(DataLoader((x, y), batch_size=3, drop_last=True))
    assert len(batches) == 3
    assert batches[2][1].tolist() == [12.0, 14.0, 16.0]


def test_a_batch_that_cannot_be_divided_goes_to_every_process():
    loader = DataLoader((np.arange(10),), batch_size=4, rank=1, world=4)
    assert [x.tolist() for (x,) in loader] == [[1], [5], [8, 9]]


def test_iterables_and_generator_functions():
    assert [b.tolist() for b in DataLoader(iter(range(5)), batch_size=2)] == [[0, 1], [2, 3], [4]]

    def stream():
        yield from ((k, k + 1) for k in range(4))

    loader = DataLoader(stream, batch_size=2, num_workers=2)
    assert repr(loader) == "<DataLoader: ? batches of 2>"
    assert [b[1].tolist() for b in loader] == [[1, 2], [3, 4]]
    assert [b[1].tolist() for b in loader] == [[1, 2], [3, 4]], "a generator function can be read again"


@pytest.mark.parametrize("shuffle", [False, True])
def test_resume_in_the_middle_of_an_epoch(shuffle):
    def fresh():
        return DataLoader(Squares(11), batch_size=2, shuffle=shuffle, seed=9)

    reference = fresh()
    expected = [b["y"].tolist() for _ in range(2) for b in reference]
    first = fresh()
    seen = []
    for batch in first:
        seen.append(batch["y"].tolist())
        if len(seen) == 4:
            break
    second = fresh()
    second.load_state_dict(first.state_dict())
    seen += [b["y"].tolist() for b in second]
    seen += [b["y"].tolist() for b in second]
    assert seen == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_look_at_the_first_batch_takes_nothing_away(workers):
    loader = DataLoader(Squares(10), batch_size=4, num_workers=workers)
    for _ in range(2):  # batches read ahead for the first look are forgotten
        next(iter(loader))
    assert loader.state_dict()["samples"] == 4
    assert len(list(loader)) == 3
    loader.load_state_dict({**loader.state_dict(), "samples": 8})
    assert len(list(loader.evaluation_batches())) == 3, "all of the epoch, and the place stays"
    assert len(list(loader)) == 1
    assert loader.state_dict()["samples"] == 0


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_error_in_a_worker_surfaces_with_its_traceback(kind):
    loader = DataLoader(Squares(8, fail=5), batch_size=2, num_workers=2, worker=kind)
    with pytest.raises(WorkerError) as caught:
        list(loader)
    assert "sample 5 is broken" in str(caught.value)
    assert "__getitem__" in str(caught.value)


def test_processes_end_when_the_loop_is_left():
    for _ in DataLoader(Squares(100, sleep=0.01), batch_size=2, num_workers=2, worker="process"):
        break
    deadline = time.monotonic() + 60
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not multiprocessing.active_children()


def test_processes_stay_for_the_next_epoch_and_end_with_the_loader():
    loader = DataLoader(Squares(8), batch_size=2, num_workers=2, worker="process")
    first = [b["y"].tolist() for b in loader]
    pids = {p.pid for p in multiprocessing.active_children()}
    assert len(pids) == 2
    assert [b["y"].tolist() for b in loader] == first
    assert {p.pid for p in multiprocessing.active_children()} == pids
    del loader
    assert not multiprocessing.active_children()


def test_a_data_set_that_cannot_be_sent():
    class Local(Squares):
        pass

    with pytest.raises(WorkerError) as caught:
        list(DataLoader(Local(8), num_workers=1, worker="process"))
    assert "worker='thread'" in str(caught.value)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("number", ["SIGINT", "SIGKILL"])
def test_ctrl_c_and_kill_leave_no_process_behind(number, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from loader_datasets import Squares\n"
        "from mithril_train.data import DataLoader\n"
        "import multiprocessing, signal\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it\n"
        "    for _ in DataLoader(Squares(10_000, sleep=0.01), batch_size=2, num_workers=2, worker='process'):\n"
        "        print(*[p.pid for p in multiprocessing.active_children()], flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    workers = [int(word) for word in process.stdout.readline().split()]
    assert len(workers) == 2
    process.send_signal(getattr(signal, number))
    _, errors = process.communicate(timeout=120)
    assert (b"KeyboardInterrupt" in errors) == (number == "SIGINT")
    end = time.monotonic() + 60
    while any(map(alive, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, workers))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_threads_end_when_the_loop_is_left():
    before = threading.active_count()
    for _ in DataLoader(Squares(50, sleep=0.001), batch_size=2, num_workers=3):
        break
    end = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_torch_data_sets_are_read():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(6).float(), torch.arange(6))
    batches = list(DataLoader(data, batch_size=4))
    assert batches[1][0].tolist() == [4.0, 5.0]
    assert isinstance(batches[0][1], np.ndarray)


def test_own_sampler_and_collate():
    loader = DataLoader(list(range(10)), batch_size=3, sampler=[9, 8, 7, 1], collate=lambda rows: sum(rows))
    assert list(loader) == [24, 1]
    assert len(loader) == 2


def test_a_dead_process_is_an_error_not_a_hang():
    with pytest.raises(WorkerError, match="has died"):
        list(DataLoader(Dying(), num_workers=1, worker="process"))


def test_bad_arguments():
    with pytest.raises(OptionError, match="batch_size"):
        DataLoader(np.zeros(3), batch_size=0)
    with pytest.raises(OptionError, match="own order"):
        DataLoader(iter([1]), shuffle=True)
    with pytest.raises(InputError, match="one leading size"):
        DataLoader((np.zeros(3), np.zeros(4)))
    with pytest.raises(InputError, match="different shapes"):
        list(DataLoader([np.zeros(2), np.zeros(3)], batch_size=2))
