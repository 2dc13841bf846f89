"""Cases of ``test_module_processes``: gradients of ``to_module()`` on many devices equal those of one device."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import mithril as ml
from mithril.models import BatchNorm1d, Dropout, Embedding, Gelu, IOKey, LayerNorm, Linear, Model, MultiHeadAttention

SIZES = {
    "small": {"blocks": 2, "features": 16, "heads": 2, "vocabulary": 24},
    "medium": {"blocks": 3, "features": 64, "heads": 4, "vocabulary": 256},
}
ROWS, TOKENS = 8, 6
warnings.filterwarnings("ignore", message=".*returned a view tensor")


def gpt(blocks, features, heads, vocabulary):
    """Return a transformer whose embedding is also its head."""
    table = Embedding(vocabulary, features, name="wte")
    x = table(IOKey("tokens"))
    for k in range(blocks):
        i = IOKey("x")
        h = i + MultiHeadAttention(features, heads, causal=True, name="attn")(LayerNorm(features, name="ln_1")(i))
        f = Gelu()(Linear(4 * features, name="fc")(LayerNorm(features, name="ln_2")(h)))
        x = Model.create(outputs={"y": h + Linear(features, name="proj")(f)}, name=f"h{k}")(x)
    return Model.create(outputs={"logits": Linear(vocabulary, name="head")(LayerNorm(features, name="ln_f")(x))})


@cache
def compiled(size):
    model = ml.compile(gpt(**SIZES[size]), "torch", shapes={"tokens": ["B", TOKENS]})
    model.bind(model.randomize_params(0))
    return model


@cache
def batch(size):
    generator = torch.Generator().manual_seed(0)
    count = SIZES[size]["vocabulary"]
    return [torch.randint(0, count, (ROWS, TOKENS), generator=generator, dtype=d) for d in (torch.int32, torch.int64)]


def loss(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


@cache
def expected(size):
    """Return the gradients of one device."""
    module = compiled(size).to_module()
    tokens, targets = batch(size)
    loss(module(tokens), targets).backward()
    return {name: p.grad for name, p in module.named_parameters()}


def assert_gradients(module, size, tolerance=3e-6):
    reference = expected(size)
    assert len(list(module.parameters())) == len(reference)
    for name, p in module.named_parameters():
        right = reference[name.removeprefix("module.").replace("_orig_mod.", "")]
        error = float((full(p.grad) - right).abs().max())
        assert error <= tolerance * max(1.0, float(right.abs().max())), f"{size}: {name} differs by {error}"


def backward(module, size, index=None, count=None):
    """Run the rows of this process forward and backward."""
    index = dist.get_rank() if index is None else index
    count = dist.get_world_size() if count is None else count
    rows = slice(index * ROWS // count, (index + 1) * ROWS // count)
    tokens, targets = batch(size)
    loss(module(tokens[rows]), targets[rows]).backward()


def shard(module, **options):
    for block in module.blocks:
        fully_shard(block, **options)
    return fully_shard(module, **options)


def compile_blocks(module):
    torch._dynamo.reset()
    for block in module.blocks:
        block.compile(fullgraph=True, backend="aot_eager")


def each_size(case):
    def run():
        for size in SIZES:
            case(size)

    return run


@each_size
def fully_sharded(size):
    module = compiled(size).to_module()
    assert list(module.block_paths) == [f"h{k}" for k in range(SIZES[size]["blocks"])]
    shard(module)
    with CommDebugMode() as exchanges:
        backward(module, size)
    assert_gradients(module, size)
    for name, p in module.named_parameters():
        assert p.to_local().numel() < p.numel() or p.shape[0] == 1, name
    counts = {str(op): n for op, n in exchanges.get_comm_counts().items()}
    blocks = SIZES[size]["blocks"]
    # each block and the root: gathered forward and backward, except for the root; their gradients scattered once
    assert counts["c10d._allgather_base_"] == 2 * blocks + 1, counts
    assert counts["c10d._reduce_scatter_base_"] == blocks + 1, counts


def compiled_blocks(size="small"):
    module = compiled(size).to_module()
    compile_blocks(module)
    shard(module)
    backward(module, size)
    assert_gradients(module, size)
    programs = {id(code) for block in module.blocks for code in block.mithril_segments[True]}
    assert len(programs) == 1, "equal blocks share one function, compiled once"


@each_size
def data_parallel(size):
    module = DistributedDataParallel(compiled(size).to_module())
    backward(module, size)
    assert_gradients(module, size)


@each_size
def replicated_shards(size):
    """Hybrid sharding: parameters are split within groups of two processes, gradients reduced over all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replica", "shard"))
    module = shard(compiled(size).to_module(), mesh=mesh)
    backward(module, size)
    assert_gradients(module, size)
    p = next(module.parameters())
    assert p.to_local().numel() * 2 == p.numel()


@each_size
def tensor_parallel(size):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("model",))
    module = compiled(size).to_module().distribute(mesh)
    split = [name for name, p in module.named_parameters() if p.to_local().numel() < p.numel()]
    heads = SIZES[size]["heads"] % dist.get_world_size() == 0
    attention = {"h0.attn.query.weight", "h0.attn.output.weight"} if heads else set()
    assert {"h0.fc.weight", "h0.proj.weight", "wte.weight"} | attention <= set(split)
    with CommDebugMode() as exchanges:
        backward(module, size, 0, 1)
    assert_gradients(module, size)
    assert exchanges.get_total_counts() <= {"small": 24, "medium": 34}[size], exchanges.get_comm_counts()
    with torch.no_grad(), CommDebugMode() as exchanges:
        module(batch(size)[0])
    gathers = {str(op): n for op, n in exchanges.get_comm_counts().items() if "gather" in str(op)}
    assert list(gathers.values()) == [1], gathers  # of the logits, not of the table


def compiled_tensor_parallel(size="small"):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("model",))
    module = compiled(size).to_module().distribute(mesh)
    compile_blocks(module)
    backward(module, size, 0, 1)
    assert_gradients(module, size)


@each_size
def two_dimensions(size):
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "model"))
    module = shard(compiled(size).to_module().distribute(mesh["model"]), mesh=mesh["data"])
    backward(module, size, mesh["data"].get_local_rank(), mesh["data"].size())
    assert_gradients(module, size)
    weight = dict(module.named_parameters())["h0.fc.weight"]
    assert weight.to_local().numel() * dist.get_world_size() == weight.numel()


@contextlib.contextmanager
def recorded_dtypes(dtypes):
    reduce = dist.reduce_scatter_single

    def recording(output, input, *args, **kwargs):
        dtypes.add(input.dtype)
        return reduce(output, input, *args, **kwargs)

    dist.reduce_scatter_single = recording
    try:
        yield
    finally:
        dist.reduce_scatter_single = reduce


def gradients_of_16_bits_travel_as_16_bits():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    module = shard(compiled("medium").to_module(), mp_policy=policy)
    dtypes = set()
    with recorded_dtypes(dtypes):
        backward(module, "medium")
    assert dtypes == {torch.bfloat16}, dtypes
    assert_gradients(module, "medium", 2e-2)


def state_of_local_rows_is_refused():
    for layer in (Dropout(0.5), BatchNorm1d(16)):
        model = Model()
        model += Linear(16)(input="x")
        model += layer
        module = ml.compile(model, "torch", shapes={"x": ["B", 8]}).to_module()
        with pytest.raises(ml.UnsupportedError, match="refer to the whole batch"):
            module(torch.ones(4, 8))
        with pytest.raises(ml.UnsupportedError, match="each chunk of a pipeline"):
            module.stage(0, num_stages=1)
        assert module.eval()(torch.ones(4, 8)).shape == (4, 16)


def checkpoints():
    """Load a checkpoint of two steps of Adam into a new module, which continues with the same numbers."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)

    def new(seed):
        source = compiled("small")
        module = source.to_module()
        if seed:
            module.load_state_dict({**module.state_dict(), **source.randomize_params(seed)})
        shard(module)
        return module, torch.optim.Adam(module.parameters(), lr=1e-2)

    def step(module, optimizer):
        optimizer.zero_grad()
        backward(module, "small")
        optimizer.step()

    module, optimizer = new(0)
    for _ in range(2):
        step(module, optimizer)
    model_state, optimizer_state = get_state_dict(module, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder[0])
    step(module, optimizer)
    other, its_optimizer = new(1)
    model_state, optimizer_state = get_state_dict(other, its_optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder[0])
    set_state_dict(other, its_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    step(other, its_optimizer)
    for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.to_local(), p.to_local(), rtol=0, atol=0, msg=name)


DEEP = {
    "small": {"blocks": 4, "features": 16, "heads": 2, "vocabulary": 24},
    "medium": {"blocks": 4, "features": 64, "heads": 4, "vocabulary": 256},
}
SCHEDULES = {  # stages of this process
    ScheduleGPipe: lambda rank, count: [rank],
    Schedule1F1B: lambda rank, count: [rank],
    ScheduleLoopedBFS: lambda rank, count: [rank, rank + count],
    ScheduleInterleaved1F1B: lambda rank, count: [rank, rank + count],
    ScheduleInterleavedZeroBubble: lambda rank, count: [rank, rank + count],
    ScheduleZBVZeroBubble: lambda rank, count: [rank, 2 * count - 1 - rank],
    ScheduleDualPipeV: lambda rank, count: [rank, 2 * count - 1 - rank],
}


def pipelines():
    """Compare every schedule of PyTorch, with tied weights on the first and the last stage."""
    rank, count = dist.get_rank(), dist.get_world_size()
    for size, options in DEEP.items():
        model = ml.compile(tied(**options), "torch", shapes={"tokens": ["B", TOKENS], "mask": ["B", 1, TOKENS, TOKENS]})
        model.bind(model.randomize_params(0))
        tokens, targets = batch(size)
        mask = torch.rand((ROWS, 1, TOKENS, TOKENS), generator=torch.Generator().manual_seed(1)) > 0.3
        mask |= torch.eye(TOKENS, dtype=torch.bool)
        single = model.to_module()
        loss(single(tokens, mask), targets).backward()
        reference = {name: p.grad for name, p in single.named_parameters()}
        for schedule_class, numbers in SCHEDULES.items():
            local = numbers(rank, count)
            total = count * len(local)
            module = model.to_module()
            parts = [module.stage(k, num_stages=total) for k in local]
            stages = [PipelineStage(p, k, total, torch.device("cpu")) for k, p in zip(local, parts, strict=True)]
            argument = stages[0] if schedule_class in (ScheduleGPipe, Schedule1F1B) else stages
            schedule = schedule_class(argument, 4, loss_fn=loss)
            # the first stage takes all inputs by position, the others the mask by name
            arguments = (tokens, mask) if 0 in local else ()
            keywords = {} if local == [0] else {"mask": mask}
            losses = []
            target = {"target": targets, "losses": losses} if total - 1 in local else {}
            schedule.step(*arguments, **keywords, **target)
            for part, k in zip(parts, local, strict=True):
                assert part.shared == (("wte.weight",) if k in (0, total - 1) else ())
            tables = [p.get_parameter("wte.weight").grad for p in parts if p.shared]
            table = sum(tables, torch.zeros_like(reference["wte.weight"]))
            dist.all_reduce(table)
            for gradient in tables:
                gradient.copy_(table)
            checked = 0
            for part in parts:
                for name, p in part.named_parameters():
                    right = reference[name]
                    error = float((p.grad - right).abs().max())
                    message = f"{schedule_class.__name__}, {size}: {name} differs by {error}"
                    assert error <= 3e-6 * max(1.0, float(right.abs().max())), message
                    checked += 1
            assert checked >= len(reference) // count - 2


def tied(blocks, features, heads, vocabulary):
    """Return a transformer with a mask whose embedding is also its head."""
    tokens, mask = IOKey("tokens", dtype="int32"), IOKey("mask", dtype="bool")
    table = IOKey("wte.weight", trainable=True, init="normal(std=0.02)")
    x = Embedding(vocabulary, features, name="wte")(tokens, weight=table)
    for k in range(blocks):
        i, m = IOKey("x"), IOKey("mask")
        h = i + MultiHeadAttention(features, heads, name="attn")(LayerNorm(features, name="ln_1")(i), mask=m)
        f = Gelu()(Linear(4 * features, name="fc")(LayerNorm(features, name="ln_2")(h)))
        x = Model.create(outputs={"y": h + Linear(features, name="proj")(f)}, name=f"h{k}")(x=x, mask=mask)
    x = LayerNorm(features, name="ln_f")(x)
    head = Linear(features, vocabulary, bias=False, name="head")
    return Model.create(outputs={"logits": head(x, weight=table)})
