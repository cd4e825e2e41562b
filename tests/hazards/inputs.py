"""What forward is given: dtypes, ranks, sizes, masks, and values at the edge."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.hazards.case import Case, Cases

CASES: list[Case] = []
case = Cases("inputs", CASES)

FLOATS = [torch.float16, torch.bfloat16, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def named(function: Any, dtype: torch.dtype) -> Any:
    function.__name__ += f"_{str(dtype).removeprefix('torch.')}"
    return function


for kind in FLOATS:

    def arithmetic(_: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).tanh()

    case(lambda d, kind=kind: d.floats(3, 4, dtype=kind), recorded=True)(named(arithmetic, kind))

for kind in INTEGERS:

    def integers(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + x.sum(-1, keepdim=True).to(x.dtype)

    case(lambda d, kind=kind: d.ints(60, 3, 4, dtype=kind), recorded=True)(named(integers, kind))

    def mixed(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    case(lambda d, kind=kind: (d.ints(60, 3, dtype=kind), d.floats(3)), recorded=True)(named(mixed, kind))

for kind in FLOAT8:

    def eight_bits(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.float() * 2

    case(lambda d, kind=kind: d.floats(3, 4).clamp(-5, 5).to(kind))(named(eight_bits, kind))

    def to_eight_bits(_: Any, x: torch.Tensor, kind: torch.dtype = kind) -> torch.Tensor:
        return x.clamp(-5, 5).to(kind)

    case(lambda d: d.floats(3, 4))(named(to_eight_bits, kind))


@case(lambda d: d.floats(3, 4, dtype=torch.complex64), recorded=True)
def complex_numbers(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * x.conj() + 1j


@case(lambda d: d.floats(8), recorded=True)
def fourier(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * 2j, 8)


@case(lambda d: d.floats(2, 64), recorded=True)
def short_time_fourier(_: Any, x: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(16, device=x.device)
    return torch.istft(torch.stft(x, 16, window=window, return_complex=True), 16, window=window)


@case(lambda d: d.mask(3, 4), recorded=True)
def booleans(_: Any, m: torch.Tensor) -> torch.Tensor:
    return m.float() @ m.float().t()


@case(lambda d: (d.floats(3, 4), d.mask(3, 4)), recorded=True)
def masked_mean(_: Any, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return (x * m).sum(1) / m.sum(1)


@case(lambda d: (d.floats(3, 4), d.mask(3, 4)))
def selected_by_a_mask(_: Any, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return x[m].mean()


@case(lambda d: (d.floats(3, 4), d.mask(3, 4).to(torch.uint8)))
def selected_by_bytes(_: Any, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return x.masked_select(m.bool()).mean()


@case(lambda d: (d.floats(2, 5, 8), d.mask(2, 5)), recorded=True)
class Encoder(nn.Module):
    """An encoder with a padding mask takes a faster way where the mask allows it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=~mask)


@case(lambda d: (d.floats(2, 5, 8), d.mask(2, 5)))
class NestedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=~mask)


@case(lambda d: (d.floats(2, 5, 8), d.mask(2, 5)), recorded=True)
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.attention(x, x, x, key_padding_mask=~mask)


@case(lambda d: (d.floats(2, 2, 5, 8), d.mask(2, 5)), recorded=True)
def scaled_dot_product_with_a_mask(_: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask[:, None, None, :])


@case(lambda d: d.floats(2, 2, 5, 8), recorded=True)
def scaled_dot_product_causal(_: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


@case(lambda d: (d.floats(3, 6, 4), d.lengths(3, 6)))
class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=6)[0]


ragged = {
    "a_list": (lambda: nn.LSTM(4, 5, batch_first=True), [6, 4, 1], True, True),
    "a_tensor": (lambda: nn.GRU(4, 5, num_layers=2, bidirectional=True), torch.tensor([5, 5, 2]), False, True),
    "any_order": (lambda: nn.RNN(4, 5, batch_first=True), torch.tensor([2, 6, 4]), True, False),
}
for name, (layer, lengths, first, in_order) in ragged.items():

    def packed(
        m: Any, x: torch.Tensor, lengths: Any = lengths, first: bool = first, in_order: bool = in_order
    ) -> tuple[Any, ...]:
        y, last = m.layer(nn.utils.rnn.pack_padded_sequence(x, lengths, first, in_order))
        return *nn.utils.rnn.pad_packed_sequence(y, first, 0.5, 7), last

    packed.__name__ = f"packed_by_{name}"
    shape = (3, 6, 4) if first else (6, 3, 4)
    case(lambda d, shape=shape: d.floats(*shape), lambda layer=layer: {"layer": layer()}, recorded=True)(packed)


@case(lambda d: (d.floats(3, 6, 4), [6, 4, 1]), recorded=True)
class PackedByAnArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        made = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(made)[0], batch_first=True)[0]


for name, cls in (("lstm", nn.LSTM), ("gru", nn.GRU), ("rnn", nn.RNN)):

    def recurrent(cls: Any = cls) -> nn.Module:
        class Recurrent(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = cls(4, 5, num_layers=2, bidirectional=True, batch_first=True, dropout=0.3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer(x)[0]

        return Recurrent()

    recurrent.__name__ = name
    recurrent.makes_module = True  # type: ignore[attr-defined]
    case(lambda d: d.floats(2, 3, 4), recorded=True)(recurrent)


@case(lambda d: (d.ints(9, 7), torch.tensor([0, 3, 5] if d.turn % 2 else [0, 1, 7], device=d.device)), recorded=True)
class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(9, 4, mode="sum")

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bags(ids, offsets)


@case(lambda d: d.ints(50, 2, 3), recorded=True)
def embedded(_: Any, ids: torch.Tensor) -> torch.Tensor:
    return functional.embedding(ids, torch.arange(100.0, device=ids.device).view(50, 2))


@case(lambda d: d.ints(50, 1).view(()), recorded=True)
def one_integer(_: Any, i: torch.Tensor) -> torch.Tensor:
    return i * 2 + torch.arange(3, device=i.device)


@case(lambda d: d.ints(50, 1).view(()), recorded=True)
def a_time_step(_: Any, t: torch.Tensor) -> torch.Tensor:
    return (t[None].float() * torch.arange(4, device=t.device)).sin()


@case(lambda d: d.ints(4, 2, 3, 2), recorded=True)
def integers_of_three_dimensions(_: Any, i: torch.Tensor) -> torch.Tensor:
    return i.float().mean((0, 2))


@case(lambda d: (d.floats(4, 3), d.ints(4, 2, 2)), recorded=True)
def gathered_by_two_dimensions(_: Any, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x[i] + x[i[:, 0]][:, None]


@case(lambda d: d.floats(0, 4), recorded=True)
def without_elements(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, torch.ones(2, 4, device=x.device)]) * 2


@case(lambda d: (d.floats(3, 4), d.floats(0)))
def one_without_elements(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 if y.numel() == 0 else x + y


@case(lambda d: d.floats(0))
def nothing_but_no_elements(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2


@case(lambda d: d.floats(1).view(()), recorded=True)
def a_number(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 + torch.ones(2, device=x.device)


@case(lambda d: (d.floats(3), d.floats(1, dtype=torch.float64).view(())), recorded=True)
def a_number_of_another_type(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


@case(lambda d: d.floats(2, 3, 4, 5, 6), recorded=True)
def five_dimensions(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x.permute(4, 2, 0, 1, 3).contiguous().sum(0)


@case(lambda d: d.floats(3, 4) * float("inf" if d.turn == 2 else 1), recorded=True)
def infinities(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1) + x


@case(lambda d: torch.full((3, 4), float("nan") if d.turn % 2 else 1.0, device=d.device), recorded=True)
def not_a_number(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2


@case(lambda d: torch.zeros(3, 4, device=d.device) * (-1 if d.turn % 2 else 1), recorded=True)
def the_sign_of_zero(_: Any, x: torch.Tensor) -> torch.Tensor:
    return 1 / x


@case(lambda d: d.floats(3, 3) @ d.floats(3, 3).t() + torch.eye(3, device=d.device))
def inverted(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(x)


@case(lambda d: (d.floats(4, 4, salt=3) + 300 * torch.eye(4, device=d.device), d.floats(4, 2)))
def solved(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve(a, b)


@case(lambda d: d.floats(3, 3))
def decomposed(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.cholesky(x @ x.t() + 10 * torch.eye(3, device=x.device))


@case(lambda d: d.floats(3, 3))
def singular_values(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svdvals(x) + torch.linalg.eigvalsh(x @ x.t())


@case(lambda d: (d.floats(5, 3) + 1, d.floats(5, 1)), recorded=True)
def least_squares(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.linalg.lstsq(a, b).solution


@case(lambda d: d.floats(3, 3))
def determinant(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.det(x) + torch.linalg.matrix_rank(x.detach() * 0 + torch.eye(3, device=x.device))


@case(lambda d: d.floats(3, 3) / 200)
def exponential_of_a_matrix(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_exp(x)


@case(lambda d: d.floats(3, 4), recorded=True)
def sorted_values(_: Any, x: torch.Tensor) -> Any:
    return x.sort(-1), x.median(-1).values, x.kthvalue(2).values, x.mode(0).values


@case(lambda d: d.floats(2, 3, 8, 8), recorded=True)
def resampled(_: Any, x: torch.Tensor) -> Any:
    y = functional.interpolate(x, scale_factor=2, mode="bilinear") + functional.interpolate(x, (16, 16), mode="bicubic")
    return functional.max_pool2d(y, 2, return_indices=True), functional.pixel_shuffle(y[:, :1].expand(2, 4, 16, 16), 2)


@case(lambda d: (d.floats(1, 2, 6, 6), d.floats(1, 4, 4, 2, salt=1).clamp(-1, 1)), recorded=True)
def sampled_on_a_grid(_: Any, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return functional.grid_sample(x, grid, align_corners=False)


@case(lambda d: (d.floats(5, 4).abs(), d.floats(5, salt=1)))
def boxes_that_are_kept(_: Any, boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    import torchvision

    boxes = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
    return boxes[torchvision.ops.nms(boxes, scores, 0.3)]


@case(lambda d: (d.floats(3, 5), d.ints(5, 3)), recorded=True)
def a_loss(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(x, y) + functional.nll_loss(x, y, reduction="sum")


@case(lambda d: (d.floats(3, 5), torch.where(d.mask(2, 3)[0], d.ints(5, 3), -100)))
def a_loss_that_ignores_labels(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(x, y, ignore_index=-100, reduction="none")


@case(lambda d: (d.floats(6, 2, 5).log_softmax(-1), d.ints(4, 2, 3) + 1, d.lengths(2, 3)))
def a_loss_over_lengths(_: Any, x: torch.Tensor, y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return functional.ctc_loss(x, y, torch.full((2,), 6, device=x.device), lengths, reduction="none")


@case(lambda d: d.floats(3, 4).to_sparse(), misuse=True)
def a_sparse_input(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x.to_dense() * 2


@case(lambda d: (d.floats(3), torch.ones(3)), misuse=True)
def an_input_from_the_host(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y.to(x.device)


@case(lambda d: nn.Parameter(d.floats(3)))
def a_parameter_as_input(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Kept(torch.Tensor):
    """A subclass."""


@case(lambda d: d.floats(3).as_subclass(Kept), misuse=True)
def a_subclass_as_input(_: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * 2).as_subclass(torch.Tensor)


@case(lambda d: {"a": {"b": [d.floats(3), (d.floats(3, salt=1), 2.0)], "c": None}}, recorded=True)
def nested_inputs(_: Any, a: dict[str, Any]) -> torch.Tensor:
    return a["b"][0] - a["b"][1][0] * a["b"][1][1]
