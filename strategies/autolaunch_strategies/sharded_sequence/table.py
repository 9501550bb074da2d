"""The table: of each torch function that sequence shards know, the rule that it follows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import functional as F

from autolaunch_strategies.model.random_streams import RANDOM_FUNCTIONS
from autolaunch_strategies.sharded_sequence.parts import Rule
from autolaunch_strategies.sharded_sequence.rules.along import along, joined, pad, reduction
from autolaunch_strategies.sharded_sequence.rules.attributes import filled, gradient, of_local, of_shape, refused
from autolaunch_strategies.sharded_sequence.rules.losses import class_loss, elementwise_loss
from autolaunch_strategies.sharded_sequence.rules.pointwise import conversion, elementwise, where
from autolaunch_strategies.sharded_sequence.rules.products import (
    addmm,
    attention,
    einsum,
    looked_up,
    matmul,
    normalized_dims,
    one_hot_dims,
    rows,
)
from autolaunch_strategies.sharded_sequence.rules.random_numbers import random
from autolaunch_strategies.sharded_sequence.rules.views import getitem, iterated, like_shape, moved, reshape, sections
from autolaunch_strategies.sharded_sequence.spelling import getters, in_place, operators, spelled

_ELEMENTWISE = """
    add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power neg negative
    positive rsub addcmul addcdiv lerp hypot copysign heaviside ldexp nextafter maximum minimum fmax fmin
    abs absolute sign sgn signbit square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p logaddexp
    logaddexp2 sin cos tan asin acos atan atan2 arctan2 arcsin arccos arctan sinh cosh tanh asinh acosh atanh
    arcsinh arccosh arctanh sinc erf erfc erfinv lgamma digamma mvlgamma polygamma xlogy logit sigmoid
    ceil floor round trunc fix frac clamp clamp_min clamp_max clip nan_to_num deg2rad rad2deg angle conj
    eq ne lt le gt ge less less_equal greater greater_equal not_equal isclose isnan isinf isfinite isposinf
    isneginf isreal logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
    bitwise_left_shift bitwise_right_shift masked_fill copy fill zero
    gelu silu mish relu relu6 elu celu selu leaky_relu hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink
    softplus softsign logsigmoid threshold
    expit log_ndtr ndtr ndtri entr i0 i0e i1 i1e xlog1py zeta erfcx
    detach clone contiguous requires_grad_ resolve_conj resolve_neg
    zeros_like ones_like empty_like full_like
    float double half bfloat16 int long short bool char byte cfloat
"""
_MOVES = """
    unsqueeze squeeze transpose permute movedim moveaxis swapaxes swapdims t adjoint select unbind diagonal
    expand broadcast_to
"""
_ONE_DIM = ("input", "dim", "keepdim")

_TABLE: list[tuple[Iterable[Any], Rule]] = [
    (spelled(_ELEMENTWISE), elementwise),
    (in_place(_ELEMENTWISE), elementwise),
    (operators(), elementwise),
    (getters("data real imag"), elementwise),
    (getters("data grad", "__set__"), elementwise),
    (spelled("where"), where),
    (spelled("to type type_as cpu cuda"), conversion),
    (spelled("linear"), rows(lambda arguments: 1)),
    (spelled("layer_norm rms_norm"), rows(normalized_dims)),
    ((F.embedding,), rows(looked_up, added=1)),
    (spelled("one_hot"), rows(one_hot_dims, added=1)),
    (spelled("matmul mm bmm mv __matmul__"), matmul),
    (spelled("addmm baddbmm"), addmm),
    ((F.scaled_dot_product_attention,), attention),
    (spelled("einsum"), einsum),
    (spelled("softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp"), along(("input", "dim"))),
    (spelled("sort argsort glu"), along(("input", "dim"), -1)),
    (spelled("topk"), along(("input", "k", "dim"), -1)),
    (spelled("normalize"), along(("input", "p", "dim"), 1)),
    (spelled("flip"), along(("input", "dims"))),
    (spelled("roll"), along(("input", "shifts", "dims"))),
    (spelled("index_select"), along(("input", "dim", "index"))),
    (spelled("repeat_interleave"), along(("input", "repeats", "dim"))),
    (spelled("diff"), along(("input", "n", "dim"), -1)),
    (spelled("gather scatter scatter_add scatter_reduce scatter_ scatter_add_ scatter_reduce_"),
     along(("input", "dim", "index"), aligned=True)),
    (spelled("take_along_dim"), along(("input", "indices", "dim"), aligned=True)),
    (spelled("tril triu"), along(("input",), (-2, -1))),
    (spelled("sum mean"), reduction(_ONE_DIM, summed=True)),
    (spelled("prod amax amin argmax argmin max min any all logsumexp median nanmedian nansum nanmean count_nonzero "
             "var std var_mean std_mean aminmax"), reduction(_ONE_DIM)),
    (spelled("mode"), reduction(_ONE_DIM, -1)),
    (spelled("norm vector_norm"), reduction(("input", "p", "dim", "keepdim"))),
    (spelled("cat concat concatenate stack", (torch,)), joined),
    ((F.pad,), pad),
    ((torch.Tensor.__getitem__,), getitem),
    (spelled("narrow"), sections(("input", "dim", "start", "length"))),
    (spelled("chunk split unsafe_chunk unsafe_split split_with_sizes tensor_split"), sections(("input", "n", "dim"))),
    (spelled(_MOVES), moved),
    (getters("T mT H mH"), moved),
    ((torch.Tensor.__iter__,), iterated),
    (spelled("view reshape flatten unflatten ravel"), reshape),
    (spelled("expand_as"), like_shape("expand")),
    (spelled("view_as"), like_shape("view")),
    (spelled("reshape_as"), like_shape("reshape")),
    ((F.cross_entropy, F.nll_loss), class_loss),
    (spelled("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div",
             (F,)), elementwise_loss),
    (RANDOM_FUNCTIONS, random),
    (getters("shape dtype device layout ndim itemsize nbytes is_cuda is_cpu is_meta is_sparse is_quantized is_nested "
             "is_mkldnn is_xpu is_mps names name _base output_nr"), of_shape),
    (spelled("dim ndimension size numel nelement __len__ is_floating_point is_complex is_signed is_contiguous stride "
             "element_size get_device is_neg is_conj is_same_size __hash__ __dir__"), of_shape),
    (getters("requires_grad grad_fn is_leaf _version retains_grad _backward_hooks"), of_local),
    (getters("requires_grad", "__set__"), of_local),
    (spelled("register_hook register_post_accumulate_grad_hook retain_grad result_type new_tensor is_inference "
             "is_pinned is_shared data_ptr untyped_storage record_stream"), of_local),
    (spelled("new_empty new_zeros new_ones new_full"), filled),
    (getters("grad"), gradient),
    ((torch.autograd.grad,), refused),
]  # fmt: skip

RULES: dict[Any, Rule] = {function: rule for functions, rule in _TABLE for function in functions}
"""Rules by function; one that is listed twice follows the later rule."""
