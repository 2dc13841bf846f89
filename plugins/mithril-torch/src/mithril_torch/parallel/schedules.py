"""Names of the schedules of pipelines, and the stages of each process that they require."""

from __future__ import annotations

from mithril.graph import OptionError

ONE_STAGE = ("gpipe", "1f1b")
V_SHAPED = ("zbvzerobubble", "dualpipev")  # the first process has the last stage, too
ZERO_BUBBLE = ("interleavedzerobubble", *V_SHAPED)  # gradients of parameters are computed after those of activations

# With the same stages in each process, for batches that are cut into fewer chunks than requested.
FOR_ANY_CHUNKS = {
    "interleaved1f1b": "loopedbfs",
    "interleavedzerobubble": "loopedbfs",
    "dualpipev": "zbvzerobubble",
}


def num_stages(schedule: str, processes: int, requested: int | None) -> int:
    """Return the number of stages of a pipeline; raise OptionError if the schedule cannot divide them."""
    per_process = 1 if schedule in ONE_STAGE else 2
    count = requested or processes * per_process
    if count == processes * per_process or (schedule not in (*ONE_STAGE, *V_SHAPED) and count % processes == 0):
        return count
    required = "one stage" if per_process == 1 else "two stages" if schedule in V_SHAPED else "equally many stages"
    raise OptionError(
        f"pipeline_stages={count} conflicts with device_mesh, which has {processes} processes for stages",
        facts=[f"pipeline_schedule='{schedule}' has {required} in each process"],
        hint=f"set pipeline_stages={processes * per_process}, or omit it",
    )


def owners(schedule: str, processes: int, stages: int) -> list[int]:
    """Return the process of each stage: in turn, or back from the last process to the first."""
    turns = [divmod(k, processes) for k in range(stages)]
    return [processes - 1 - k if turn % 2 and schedule in V_SHAPED else k for turn, k in turns]
