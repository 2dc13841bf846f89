"""Processes that agree: threads represent processes, a dictionary for the store of the rendezvous."""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import mithril as ml
from mithril_parallel import processes as module, watchdog
from mithril_parallel.processes import PREFIX, World
from mithril_parallel.sharding.checkpoint import Reader, begin_save
from mithril_parallel.sharding.storage import DamagedError
from mithril_parallel.sharding.tensor_parts import Part, PartedTensor
from mithril_parallel.watchdog import Watchdog


class Texts(dict):
    """A store in this process."""

    def set(self, key, text):
        self[key] = text

    def delete(self, key):
        self.pop(key, None)


def worlds(size=2, timeout=5.0):
    store = Texts()
    return [World(rank, size, store, timeout=timeout) for rank in range(size)]


def together(function, all_worlds):
    """Return the results of the function on every process; an exception is a result."""

    def attempt(world):
        try:
            return function(world)
        except ml.MithrilError as error:
            return error

    with ThreadPoolExecutor(len(all_worlds)) as pool:
        return list(pool.map(attempt, all_worlds))


def test_values_are_exchanged_in_order_and_the_store_stays_small():
    processes = worlds(3)
    results = together(lambda w: [w.exchange((w.rank, k), "numbers") for k in range(20)], processes)
    assert results == [[[[0, k], [1, k], [2, k]] for k in range(20)]] * 3
    assert len(processes[0].store) <= 8


def test_no_attempt_of_a_job_reads_keys_of_another(monkeypatch):
    """Neither a request to stop nor values: the store of a launcher survives a restart."""
    server = Texts()

    class Client:
        """The store of an engine in one process."""

        def __init__(self):
            self.store, self.prefix = self, PREFIX
            self.set = lambda key, text: server.set(f"{self.prefix}/{key}", text)
            self.get = lambda key: server.get(f"{self.prefix}/{key}")
            self.delete = lambda key: server.delete(f"{self.prefix}/{key}")

    def attempt():
        clients = [Client() for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda k: module._known(clients[k], k, 2, 5.0), range(2)))

    monkeypatch.setattr(module, "_worlds", {})
    before = attempt()
    together(lambda w: w.exchange(f"old {w.rank}", "the start"), before)
    dogs = [Watchdog(world) for world in before]
    dogs[0].start()
    dogs[0].request_stop()
    before[1].leave("SIGTERM")
    wait_until(lambda: any("stop" in key for key in server))
    dogs[0].stop()

    after = attempt()
    assert after[0].reason(1) is None
    assert together(lambda w: w.exchange(w.rank, "the start"), after) == [[0, 1]] * 2
    dogs = [Watchdog(world) for world in after]
    for dog in dogs:
        dog.start()
        assert after[dog.world.rank].store.get(dog._stop_key) is None
        dog.stop()


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


def test_missing_process_is_named_by_all_others_in_time():
    processes = worlds(3, timeout=0.3)
    errors = together(lambda w: w.barrier("step 8") if w.rank != 1 else None, processes)
    assert errors[1] is None
    for rank in (0, 2):
        assert str(errors[rank]).startswith("process 1 did not arrive at: step 8")


def test_process_that_ends_tells_the_reason_at_once():
    processes = worlds(2, timeout=60.0)
    errors = together(lambda w: w.barrier("step 8") if w.rank == 0 else w.leave("InputError: no data"), processes)
    assert "process 1 ended: InputError: no data" in str(errors[0])


def test_process_of_the_store_ends_after_all_that_need_it():
    processes, ended = worlds(3, timeout=60.0), []

    def finish(world):
        if world.rank == 2:
            world.leave("InputError: no data")
            return
        time.sleep(0.3 * world.rank)
        ended.append(world.rank)
        world.finish("the end")
        ended.append(f"{world.rank} ended")

    before = time.monotonic()
    together(finish, processes)
    assert ended.index("0 ended") > ended.index(1)
    assert time.monotonic() - before < 30.0


def test_processes_are_in_step_again_after_an_error():
    processes = worlds(timeout=0.5)

    def fail(world):
        world.enter()
        for _ in range(2 - world.rank):  # process 1 fails before its second exchange
            world.barrier("step 8")
        world.leave("InputError: no data")

    errors = together(fail, processes)
    assert "process 1 ended: InputError: no data" in str(errors[0])

    def train(world):
        world.enter()
        time.sleep(0.3 * world.rank)  # process 0 already waits
        return world.exchange(world.rank, "the start of training")

    assert together(train, processes) == [[0, 1]] * 2


def test_differences_are_grouped_by_process():
    errors = together(lambda w: w.agree({"step": 6 if w.rank == 1 else 8, "seed": 0}, "resume"), worlds(3))
    for error in errors:
        assert str(error).startswith("the processes do not agree on resume: step\n")
        assert "step: processes 0, 2: 8; process 1: 6" in str(error)


def test_different_calls_are_an_error():
    errors = together(lambda w: w.barrier("the save" if w.rank else "validation"), worlds())
    assert "process 0: validation" in str(errors[0])
    assert "process 1: the save" in str(errors[1])


# -- checkpoints -----------------------------------------------------------------------------------------------------
def half(rank, value):
    """Return the rows of one process of two."""
    rows = np.full((2, 3), value, np.float32)
    return {"w": PartedTensor("w", (4, 3), rows.dtype, [Part((2 * rank, 0), (2, 3), lambda: rows)])}


def saved(folder, value, processes=None, **options):
    return together(
        lambda w: begin_save(folder, half(w.rank, value), {"step": value}, w, **options).finish(), processes or worlds()
    )


def test_process_that_dies_while_saving_leaves_the_previous_checkpoint(tmp_path):
    assert saved(tmp_path, 1) == [None, None]

    class Killed(World):
        def gather(self, key, value, purpose):
            if key.startswith("save/") and self.rank == 1:
                raise ml.BackendError("killed")
            return super().gather(key, value, purpose)

    dying = worlds(timeout=0.3)
    dying[1].__class__ = Killed
    errors = saved(tmp_path, 2, dying)
    assert "process 1 did not arrive" in str(errors[0])
    reader = Reader(tmp_path)
    assert reader.metadata == {"step": 1}
    np.testing.assert_array_equal(reader.tensors["w"].read(), np.full((4, 3), 1, np.float32))
    assert saved(tmp_path, 3) == [None, None]
    np.testing.assert_array_equal(Reader(tmp_path).tensors["w"].read(), np.full((4, 3), 3, np.float32))
    assert len(os.listdir(tmp_path)) == 3, "the parts of other saves are removed"


def test_save_that_did_not_finish_is_not_a_checkpoint(tmp_path):
    saved(tmp_path, 1)
    (tmp_path / "commit.json").unlink()
    with pytest.raises(DamagedError, match="does not contain a complete checkpoint\n  it contains a save that did not"):
        Reader(tmp_path)


@pytest.mark.parametrize("place", [-3, 40])
def test_flipped_byte_is_noticed(tmp_path, place):
    saved(tmp_path, 1)
    file = next(tmp_path.glob("part-00001*"))
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match="the checksum of (its header|'w') is wrong"):
        Reader(tmp_path).tensors["w"].read()


def test_shortened_and_missing_parts_are_noticed(tmp_path):
    saved(tmp_path, 1)
    file = next(tmp_path.glob("part-00001*"))
    data = file.read_bytes()
    file.write_bytes(data[:-4])
    with pytest.raises(DamagedError, match="the part .* of .w. ends outside of the file"):
        Reader(tmp_path).tensors["w"].read()
    with pytest.raises(DamagedError, match="the part .* of .w. ends outside of the file"):
        Reader(tmp_path).verify(1, 2)
    file.unlink()
    with pytest.raises(DamagedError, match="'part-00001.*' is missing"):
        Reader(tmp_path)


def test_process_that_is_cut_off_after_the_commit_keeps_its_parts(tmp_path):
    class CutOff(World):
        def gather(self, key, value, purpose):
            if key.endswith("/committed"):
                raise ml.BackendError("cut off")
            return super().gather(key, value, purpose)

    processes = worlds(timeout=0.3)
    for world in processes:
        world.__class__ = CutOff
    assert [str(error) for error in saved(tmp_path, 1, processes)] == ["cut off"] * 2
    np.testing.assert_array_equal(Reader(tmp_path).tensors["w"].read(), np.ones((4, 3)))


def test_full_disk_of_one_process_is_an_error_of_all(tmp_path):
    saved(tmp_path, 1)
    large = np.zeros(200_000, np.float32)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(world):
        array = large if world.rank else large[:1]
        tensors = {"w": PartedTensor("w", (2,), array.dtype, [Part((world.rank,), array.shape, lambda: array)])}
        begin_save(tmp_path, tensors, {"step": 2}, world).finish()

    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
    try:
        errors = together(save, worlds())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    for error in errors:
        assert str(error).startswith(f"process 1 could not write '{tmp_path}'")
        assert "File too large" in str(error)
    assert Reader(tmp_path).metadata == {"step": 1}
    assert len(os.listdir(tmp_path)) == 3, "no litter"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_process_that_cannot_commit_is_named_by_all(tmp_path, asynchronous):
    (tmp_path / "commit.json").mkdir()  # cannot be replaced by a file

    def save(world):
        options = {"shared": True, "asynchronous": asynchronous}
        begin_save(tmp_path, {"w": half(world.rank, 1)["w"]}, {}, world, **options).finish()

    for error in together(save, worlds(timeout=60.0)):
        assert str(error).startswith(f"process 0 could not write the commit of '{tmp_path}'")
        assert "hint: check the free space" in str(error)


def test_errors_of_the_thread_that_saves_are_raised(tmp_path, monkeypatch):
    world = World()
    monkeypatch.setattr(world, "gather", lambda *_: (_ for _ in ()).throw(ConnectionError("the store is closed")))
    save = begin_save(tmp_path, {"w": np.ones(2)}, {}, world, asynchronous=True)
    with pytest.raises(ml.BackendError, match="could not be saved\n  ConnectionError: the store is closed"):
        save.finish()


def test_folders_of_other_libraries_are_recognized_as_unfinished_saves(tmp_path):
    (tmp_path / "dcp-0123").mkdir()
    with pytest.raises(DamagedError, match="a save that did not finish"):
        Reader(tmp_path)


def test_disks_of_nodes_hold_the_parts_of_their_processes(tmp_path):
    def save(world):
        arrays = {"w": np.full((4, 3), 7, np.float32)}
        begin_save(tmp_path / f"node{world.rank}", arrays, {}, world).finish()

    assert together(save, worlds()) == [None, None]
    commits = [json.loads((tmp_path / f"node{k}" / "commit.json").read_text()) for k in range(2)]
    assert commits[0] == commits[1]
    for k in range(2):
        np.testing.assert_array_equal(Reader(tmp_path / f"node{k}").tensors["w"].read(), np.full((4, 3), 7))


def test_asynchronous_save_returns_before_it_is_written(tmp_path):
    proceed = threading.Event()

    class Slow(World):
        def gather(self, key, value, purpose):
            if key.startswith("save/"):
                proceed.wait(5)
            return super().gather(key, value, purpose)

    processes = worlds()
    for world in processes:
        world.__class__ = Slow
    values = [half(rank, 1) for rank in range(2)]
    saves = together(lambda w: begin_save(tmp_path, values[w.rank], {}, w, asynchronous=True), processes)
    with pytest.raises(DamagedError):
        Reader(tmp_path)
    proceed.set()
    for save in saves:
        save.finish()
    np.testing.assert_array_equal(Reader(tmp_path).tensors["w"].read(), np.ones((4, 3)))


@pytest.mark.parametrize(("form", "files"), [("parts", 3), ("orbax", 2)])
def test_object_store(form, files, tmp_path):
    pytest.importorskip("fsspec")
    if form == "orbax":
        pytest.importorskip("tensorstore")
    folder = f"memory://{tmp_path.name}-{form}/run"
    assert saved(folder, 1, format=form) == [None, None]
    assert saved(folder, 2, format=form) == [None, None]
    np.testing.assert_array_equal(Reader(folder).tensors["w"].read(), np.full((4, 3), 2, np.float32))
    assert len(Reader(folder).folder.names()) == files


def test_missing_file_systems_are_named():
    with pytest.raises(ml.PluginError, match="fsspec cannot open 'nowhere://x'"):
        Reader("nowhere://x")


# -- watchdogs -------------------------------------------------------------------------------------------------------
@pytest.fixture
def dogs():
    running = [Watchdog(world) for world in worlds(3, timeout=0.5)]
    for dog in running:
        dog.start()
    yield running
    for dog in running:
        dog.stop()


def ends(monkeypatch):
    """Return the list of (rank, suspects) of watchdogs that end their process."""
    ended = []
    monkeypatch.setattr(Watchdog, "_end", lambda dog, suspects: (ended.append((dog.world.rank, suspects)), dog.stop()))
    return ended


def wait_for(ended, count=1):
    """Wait until processes have ended; on a slow machine this takes longer than their timeout."""
    wait_until(lambda: len(ended) >= count)


def test_process_that_others_wait_for_is_named(dogs, monkeypatch):
    ended = ends(monkeypatch)
    dogs[1].stop()  # as if it were killed
    with dogs[0].waiting("step 3"), dogs[2].waiting("step 3"):
        wait_for(ended, 2)
    assert sorted(rank for rank, _ in ended) == [0, 2]
    for _, suspects in ended:
        assert len(suspects) == 1
        assert suspects[0].startswith("process 1 has stopped: no sign of life for")


def test_process_that_is_busy_elsewhere_is_named(dogs, monkeypatch):
    ended = ends(monkeypatch)
    with dogs[0].waiting("step 3"), dogs[2].waiting("step 3"):
        wait_for(ended)
    assert ended[0][1][0].startswith("process 1 is late: it has been in the start for")


def test_compiling_is_not_late(dogs, monkeypatch):
    ended = []
    monkeypatch.setattr(Watchdog, "_end", lambda dog, suspects: ended.append(suspects))
    with dogs[0].waiting("step 1"), dogs[1].waiting("step 1", compiles=True), dogs[2].waiting("step 1"):
        time.sleep(1.2)
    assert not ended


def test_work_around_another_wait_is_still_watched(dogs, monkeypatch):
    ended = ends(monkeypatch)
    with dogs[0].waiting("the save of step 4"):
        with dogs[0].waiting("reading results"):
            pass
        wait_for(ended)
    assert [rank for rank, _ in ended] == [0]


def test_exchange_through_a_frozen_store_ends(dogs, monkeypatch):
    ended, thawed = ends(monkeypatch), threading.Event()

    def frozen(*_):
        thawed.wait()
        raise RuntimeError("closed")

    monkeypatch.setattr(Texts, "set", frozen)
    with ThreadPoolExecutor(1) as pool:
        exchange = pool.submit(dogs[1].world.exchange, 0, "the seed")
        wait_for(ended)
        thawed.set()
        with pytest.raises(ml.BackendError, match="process 0, .* is not reachable"):
            exchange.result()
    assert (1, "process 0, through which the processes exchange messages, does not answer") in [
        (rank, suspects[0]) for rank, suspects in ended
    ]


def test_time_in_which_this_process_stood_still_does_not_count(dogs):
    dogs[0].stop()
    with dogs[0].waiting("step 1"):
        dogs[0]._since -= 0.6
        assert dogs[0]._is_overdue()
        dogs[0]._forgive(0.6)
        assert not dogs[0]._is_overdue()


def test_processes_stop_after_the_same_step(dogs):
    dogs[2].request_stop()

    def train(world):
        dog = dogs[world.rank]
        while dog.stop_at is None or dog.steps < dog.stop_at:
            dog.begin_step()
            world.barrier("a step")
        return dog.steps

    steps = together(train, [dog.world for dog in dogs])
    assert len(set(steps)) == 1


def test_error_of_a_collective_names_the_lost_process(dogs):
    dogs[1].stop()
    dogs[2].world.leave("InputError: no data")
    with pytest.raises(ml.BackendError) as caught, dogs[0].waiting("step 2"):
        raise ml.BackendError("a collective failed")
    assert "process 1 has stopped: no sign of life" in str(caught.value)
    assert "process 2 ended: InputError: no data" in str(caught.value)


def test_waits_after_an_error_are_short(monkeypatch):
    monkeypatch.setattr(watchdog.atexit, "register", lambda *_: None)
    dog = Watchdog(worlds(3, timeout=60.0)[0])
    assert not dog._is_overdue()
    with pytest.raises(ml.BackendError), dog.waiting("step 2", collective=False):
        raise ml.BackendError("a collective failed")
    assert dog._deadline - time.monotonic() <= 20  # a third of the timeout
    with dog.waiting("the end of the last save"):
        assert not dog._is_overdue()
        dog._deadline -= 20
        assert dog._is_overdue()
