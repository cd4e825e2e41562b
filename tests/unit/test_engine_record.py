"""Recording: what becomes a task, what does not, and what is refused by name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from nimble_jobs import graph
from nimble_jobs.engine.capture import capture
from nimble_jobs.engine.memory import Memory
from nimble_jobs.engine.private.operators import draws_random
from nimble_jobs.engine.record import Recording, flatten_outputs, record, state_of
from nimble_jobs.engine.verify import check
from nimble_jobs.errors import CannotRecord, CheckFailed, EngineError
from nimble_jobs.schedule import BufferKind

CPU = torch.device("cpu")


def recorded(module: nn.Module, x: torch.Tensor) -> Recording:
    return record(module, {"x": x}, state_of(module), CPU, module)


def replayed_like_eager(module: nn.Module, x: torch.Tensor, below: int = 2) -> Recording:
    """Record, capture and check against eager on fresh input; fails where they differ."""
    recording = recorded(module, x)
    plan, _ = graph.single_stream(recording.program)
    graph.check_plan(recording.program, plan)
    instance = capture(recording.program, plan, state=state_of(module), constants=recording.constants, device=CPU)
    check(instance, module, recording.program.inputs, CPU, tolerance=1e-6, seed=7, below=below)
    return recording


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)
        self.register_buffer("shift", torch.ones(4), persistent=False)
        self.plain = torch.full((4,), 3.0)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        left, right = self.a(x).relu_(), self.b(x)
        right += self.shift
        joined = torch.cat([left, right * self.plain], dim=1)
        return {"joined": joined, "tail": joined[:, 2:].transpose(0, 1)}


def test_branches_mutations_views_and_attributes_replay_like_eager() -> None:
    """In-place operators, views of intermediates, buffers and plain tensor attributes all replay as in eager."""
    program = replayed_like_eager(Branches(), torch.randn(3, 6)).program
    ops = [t.op for t in program.tasks]
    assert ops.count("aten.addmm.out") == 2  # into a buffer that the memory plan places
    assert not any("transpose" in op or "slice" in op or op == "aten.t.default" for op in ops)  # views are no tasks
    assert next(t for t in program.tasks if t.op == "aten.relu_.default").mutates
    assert {p.name for p in program.state} >= {"a.weight", "shift", "plain"}
    assert [p.name for p in program.outputs] == ["joined", "tail"]


def test_a_replay_follows_the_weights_that_it_is_bound_to() -> None:
    """One program serves other weights of the same module."""
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    recording = recorded(first, torch.zeros(4, 3))
    plan, _ = graph.single_stream(recording.program)
    instance = capture(recording.program, plan, state=state_of(second), constants={}, device=CPU)
    assert check(instance, second, recording.program.inputs, CPU, tolerance=1e-6, seed=1) <= 1e-6
    with pytest.raises(CheckFailed, match="differs from eager by a relative norm"):
        check(instance, first, recording.program.inputs, CPU, tolerance=1e-6, seed=1)


class Allocates(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], 2 * x.shape[1])
        out[:, : x.shape[1]] = x
        out[:, x.shape[1] :] = x * torch.tensor([1.0, 2.0, 3.0])
        return out + torch.arange(6)


def test_bare_allocations_and_constants_replay() -> None:
    """A tensor made by `empty` is filled at each replay; literal tensors become constants named by digest."""
    recording = replayed_like_eager(Allocates(), torch.randn(2, 3))
    assert len(recording.constants) == 1
    assert [b.name for b in recording.program.buffers if b.kind is BufferKind.CONSTANT] == list(recording.constants)


class TrainedBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def test_batch_norm_in_training_mode_mutates_its_statistics() -> None:
    """The running statistics are written although the operator's schema does not say so."""
    module = TrainedBatchNorm().train()
    program = recorded(module, torch.randn(8, 3)).program
    task = next(t for t in program.tasks if "batch_norm" in t.op)
    names = {p.view.buffer: p.name for p in program.state}
    assert {names[v.buffer] for v in task.mutates} == {"norm.running_mean", "norm.running_var"}
    program = recorded(module.eval(), torch.randn(8, 3)).program
    assert not any(t.mutates for t in program.tasks)


def test_dropout_is_marked_as_random() -> None:
    """Tasks that draw random numbers say so."""
    program = recorded(nn.Dropout(0.5).train(), torch.ones(4, 4)).program
    assert any(t.random for t in program.tasks)


class ReadsHost(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x


class DependsOnData(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]


class Chooses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.cond(x.sum() > 0, lambda u: u + 1, lambda u: u - 1, (x,))
        return found


class MakesSparse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to_sparse().to_dense()


class HoldsSparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.eye(4).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix
        assert isinstance(matrix, torch.Tensor)
        return matrix @ x


class MakesNested(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor([x[:1], x]).to_padded_tensor(0.0)


class FailsUnderModes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch._C._len_torch_dispatch_stack():
            raise KeyError("mode")
        return x + 1


class NoTensor(nn.Module):
    def forward(self, x: torch.Tensor) -> int:
        return 3


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (ReadsHost(), r"aten._local_scalar_dense.default at .*test_engine_record.py:\d+.* reads a value of the device"),
        (DependsOnData(), r"aten.index.Tensor at .*test_engine_record.py:\d+.* shape depends on the data"),
        (Chooses(), r"cond at .*test_engine_record.py:\d+.* takes functions"),
        (
            MakesSparse(),
            r"to_sparse.* at .*test_engine_record.py:\d+.* has a tensor that is sparse_coo",
        ),
        (HoldsSparse(), r"'matrix' is sparse_coo; expected a dense tensor"),
        (MakesNested(), r"nested.* at .*test_engine_record.py:\d+.* has a tensor that is nested"),
        (FailsUnderModes(), r"the model fails while it is recorded: KeyError: 'mode'"),
        (NoTensor(), r"the model returned int; expected a tensor"),
    ],
)
def test_what_no_schedule_can_hold_is_named(module: nn.Module, message: str) -> None:
    """Host reads and data-dependent shapes are refused with operator and source line."""
    with pytest.raises(CannotRecord, match=message):
        recorded(module, torch.randn(4))


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("recorded" if torch._C._len_torch_dispatch_stack() else "eager")


def test_what_fails_in_eager_too_raises_its_own_error() -> None:
    """It is no matter of recording."""
    with pytest.raises(KeyError, match="eager"):
        recorded(Fails(), torch.randn(4))


class Keeps(nn.Module):
    """Sets a tensor of its own anew at each call."""

    def __init__(self, *, buffer: bool = False, reads: bool = False) -> None:
        super().__init__()
        self.linear, self.reads = nn.Linear(4, 3), reads
        if buffer:
            self.register_buffer("last", torch.zeros(3))
        else:
            self.last = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x)
        shift, self.last = self.last, found.detach() * 0.001
        return found + shift if self.reads else found


def test_a_tensor_that_calls_replace_is_left_to_them_unless_it_is_read_or_a_buffer() -> None:
    """A replay would go on with the old one."""
    replayed_like_eager(Keeps(), torch.randn(4))
    for module in (Keeps(buffer=True), Keeps(reads=True)):
        with pytest.raises(CannotRecord, match="replaces its tensor 'last'"):
            recorded(module, torch.randn(4))


class HiddenHostWork(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.mul, x, 2.0).result()


def test_work_hidden_from_the_recorder_fails_the_check() -> None:
    """What another thread does to a tensor cannot be seen, so the check on fresh input must catch it."""
    with pytest.raises(CheckFailed):
        replayed_like_eager(HiddenHostWork(), torch.randn(4))


def test_hooks_are_gone_after_recording_even_when_it_fails() -> None:
    """Recording leaves no hook behind on the module."""
    module = nn.Sequential(ReadsHost())
    with pytest.raises(CannotRecord):
        recorded(module, torch.randn(4))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_another_layout_of_the_state_is_refused() -> None:
    """A program recorded over contiguous weights does not run over channels-last ones."""
    module = nn.Conv2d(3, 4, 3)
    recording = recorded(module, torch.randn(1, 3, 8, 8))
    plan, _ = graph.single_stream(recording.program)
    other = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(EngineError, match=r"'weight' is float32\[4, 3, 3, 3\] with strides"):
        capture(recording.program, plan, state=state_of(other), constants={}, device=CPU)
    with pytest.raises(EngineError, match="no tensor 'weight'"):
        capture(recording.program, plan, state={}, constants={}, device=CPU)


class ViewsItsWeight(nn.Module):
    """As cuDNN's recurrent layers view all of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(0).set_(self.weight.detach())
        return x @ whole.t()


def test_an_empty_tensor_may_become_a_view() -> None:
    """Of what the program knows; no task, and replays follow the weight."""
    module = ViewsItsWeight()
    recording = replayed_like_eager(module, torch.randn(4, 3))
    assert [t.op for t in recording.program.tasks] == ["aten.mm.out"]
    assert [p.name for p in recording.program.state] == ["weight"]


class Gathers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[torch.tensor([2, 0])] + torch.where(x[:2] > 0, 1.0, 0.0)


def test_indexing_with_integers_has_a_fixed_shape() -> None:
    """Only masks make a shape depend on data."""
    replayed_like_eager(Gathers(), torch.randn(3, 4))


def test_outputs_are_named_by_their_place() -> None:
    """Nested containers give dotted names."""
    a = torch.zeros(1)
    assert list(flatten_outputs(a)) == ["output"]
    assert list(flatten_outputs((a, [a, {"k": a}]))) == ["output.0", "output.1.0", "output.1.1.k"]
    assert list(flatten_outputs({"x": a, "y": (a, a), "n": None})) == ["x", "y.0", "y.1"]


def test_embeddings_are_checked_with_integers_in_range() -> None:
    """Integer inputs are drawn below the bound that is given."""
    replayed_like_eager(nn.Embedding(5, 3), torch.zeros(2, 4, dtype=torch.int64), below=5)


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout)


def test_attention_without_dropout_is_not_random() -> None:
    """The operator may draw random numbers, but with no dropout it draws none, and its replays can be checked."""
    recording = replayed_like_eager(Attention(0.0), torch.randn(1, 2, 4, 8))
    assert not any(t.random for t in recording.program.tasks)


class FillsMany(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.max_pool2d(x, 2)
        return torch.cat([pooled, nn.functional.avg_pool2d(x, 2)], dim=1).sigmoid().mean(dim=(2, 3))


def test_operators_fill_planned_buffers_where_they_can() -> None:
    """All intermediates of such operators lie in the arena, and keep the strides that eager gives them."""
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 3, 8, 8).contiguous(memory_format=layout)
        program = replayed_like_eager(FillsMany(), x).program
        assert all(t.op.endswith("out") and t.outputs is not None for t in program.tasks)
        assert {v for t in program.tasks for v in t.writes} == {v for t in program.tasks for v in t.mutates}
        assert all(not set(t.reads) & set(t.writes) for t in program.tasks)


def test_seeds_on_the_host_are_made_by_one_task_and_read_by_another() -> None:
    """Attention returns the seeds of its dropout on the host while nothing is captured; they are no constants."""
    library = torch.library.Library("nimble_jobs_test", "FRAGMENT")  # lives as long as the test
    tags = (torch.Tag.nondeterministic_seeded,)
    library.define("_some_attention(Tensor x, float dropout_p=0.) -> (Tensor, Tensor)", tags=tags)
    library.define("_some_attention_backward(Tensor x, Tensor seed, float dropout_p=0.) -> Tensor", tags=tags)
    library.impl("_some_attention", lambda x, dropout_p=0.0: (torch.empty_like(x), torch.tensor(3)), "Meta")
    library.impl(
        "_some_attention_backward", lambda x, seed, dropout_p=0.0: torch.empty_like(x), "CompositeExplicitAutograd"
    )
    ops = torch.ops.nimble_jobs_test

    def call(x: torch.Tensor) -> torch.Tensor:
        y, seed = ops._some_attention(x, 0.5)
        result: torch.Tensor = ops._some_attention_backward(y, seed, 0.5)
        return result

    x = torch.empty(3, device="meta")
    program = record(call, {"x": x}, {}, x.device).program
    first, second = (t for t in program.tasks if "attention" in t.op)
    (seed,) = [v for v in first.writes if v.shape == ()]
    assert program.buffers[seed.buffer].kind is BufferKind.INTERMEDIATE
    assert seed in second.reads
    assert first.random
    assert not second.random
    assert not program.constants


@pytest.mark.parametrize(
    ("dropout", "train", "draws"), [(0.0, True, False), (0.5, False, False), (0.5, True, True), (0.0, False, False)]
)
def test_recurrent_layers_draw_only_for_dropout_in_training(dropout: float, train: bool, draws: bool) -> None:
    """cuDNN's operator says of every call that it draws."""
    x = torch.zeros(1)
    args = (x, [x], 4, None, x, x, 2, 8, 0, 1, False, dropout, train, False, [], None)
    assert draws_random(torch.ops.aten._cudnn_rnn.default, args, {}) is draws


@pytest.mark.parametrize(
    ("index", "moved"),
    [(torch.tensor([0, 2]), True), (torch.tensor([True, False, True]), False)],
    ids=["places", "mask"],
)
def test_numbers_that_are_put_into_places_move_to_the_device(index: torch.Tensor, moved: bool) -> None:
    """They would be copied at each launch; with a mask they are filled in by value."""
    memory = Memory(torch.device("meta"))
    target, number = torch.zeros(3, device="meta"), torch.tensor(7.0)
    args, _ = memory._move_host_constants(torch.ops.aten.index_put_.default, (target, [index], number), {})
    assert args[2].device.type == ("meta" if moved else "cpu")
