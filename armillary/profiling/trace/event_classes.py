"""What a name in a trace means: the class of work of an operator or kernel, and what a host call waits for.

Names are all that is left of a kernel inside a CUDA graph, so the patterns are ordered from the most specific on.
"""

import re
from functools import cache

STEP = "ProfilerStep#"
"""what the annotation of a step begins with, as torch.profiler writes it"""
MODULE = "nn.Module: "
"""what the Python event of a module's forward begins with, as in torch's own stacks"""
OPTIMIZERS = "armillaryOptimizers"
"""key of the list of {"weights", "dtype"} that our recordings have next to traceEvents"""
_KERNELS: tuple[tuple[str, str], ...] = (
    (
        "collective",
        r"nccl|rccl|oneccl|allreduce|all_reduce|allgather|all_gather|reducescatter|reduce_scatter"
        r"|alltoall|all_to_all|cross_device|symm_mem|deep_?ep|nvshmem",
    ),
    ("copy", r"reshape_and_cache|store_?(kv_?)?cache|kv_?cache_(update|store|write)"),
    ("attention", r"flash|fmha|attention|attn|mha_|_sdpa|cudnn_generated_fort_native_sdpa|flex_"),
    ("conv", r"conv(?!ert)|wgrad|dgrad|winograd|implicit_gemm|im2col|cudnn_infer|fprop|xdnn"),
    ("optimizer", r"adam|sgd|\blamb(?!da)|adagrad|optimizer|muon"),
    ("embedding", r"embedding|index_?select"),
    (
        "gemm",
        r"gemm|matmul|cublas|cutlass|wgmma|_mm_|\bmm\b|addmm|bmm|cijk_|sm\d\d_xmma|gemv|splitk|dot_kernel"
        r"|triton_tem|nvjet|dot_product|::(add)?mv_?$",
    ),
    ("norm", r"layer_?norm|rms_?norm|batch_?norm|group_?norm|\bbn_|bn_fw|bn_bw"),
    ("softmax", r"softmax|cross_entropy|nll|logsumexp"),
    ("copy", r"memcpy|memset|copy|cat_?array|catarray|transpose|permute|fill|triton_poi_fused_clone|convert"),
    (
        "elementwise",
        r"elementwise|triton_poi|triton_red|triton_per|pointwise|reduce|dropout|gelu|relu|silu|distribution"
        r"|index|scatter|sort|topk|scan|cpp_fused|multi_tensor|foreach|fused|compiledfxgraph|torch-compiled"
        r"|compiledfunction",
    ),
)
_KERNEL_PATTERNS = tuple((work, re.compile(pattern)) for work, pattern in _KERNELS)

_SYNC_CALLS = re.compile(
    r"^(cuda|hip|cu)(Stream|Device|Event|Ctx)Synchronize|^(cuda|hip|cu)Memcpy(?!\w*(Async|DtoD))"
    r"|^ze\w+Synchronize|^ur(EventWait|QueueFinish)"
)
_SYNC_OPS = frozenset(
    {
        "aten::item",
        "aten::_local_scalar_dense",
        "aten::is_nonzero",
        "aten::nonzero",
        "aten::equal",
    }
)
_COMM = re.compile(r"^(c10d::|_c10d_functional::|gloo:|nccl:|mpi:|ucc:|record_param_comms|ProcessGroup)")
_LOADER = re.compile(
    r"^armillary loader|^enumerate\(DataLoader\)"
    r"|dataloader\.py\(\d+\): (__next__|_next_data|_get_data|_try_get_data)"
)
_LAUNCHES = re.compile(r"Launch|MemcpyAsync|MemsetAsync")
_SLOW_CALLS = re.compile(
    r"Malloc|Free|HostAlloc|HostRegister|ModuleLoad|LibraryLoad|GetFunction|GraphInstantiate|PriorityRange"
)
_PRIVATE = re.compile(r"^(autograd::|CompiledFunction|Torch-Compiled|## Call|TorchDynamo|Optimizer\.|torch::autograd)")
_PLAIN_FP32 = re.compile(
    r"sgemm|f32f32_f32f32|_ffma|simt|scudnn|gemv|gemmk1|gemmsn|winograd|cijk_\w+_sb_|conv_depthwise"
)
_ELEMENT = re.compile(
    r"(?:CatArrayBatchedCopy\w*|\w*Functor\w*|\bCopy)<(?:at::native::\(anonymous namespace\)::)?"
    r"(?:OpaqueType<(\d+)u?>|(c10::BFloat16|c10::Half|__half|float|double|long|int|short|bool|(?:un)?signed char))"
)
"""the element type that a kernel over lists of tensors is instantiated for"""
_SIZES = {"float": 4, "int": 4, "double": 8, "long": 8, "bool": 1, "unsigned char": 1, "signed char": 1}
_VIEWS = """
    view as_strided expand expand_as t transpose permute reshape _reshape_alias _unsafe_view detach detach_ alias empty
    empty_like empty_strided new_empty new_empty_strided resize_ select slice narrow unbind split split_with_sizes chunk
    squeeze unsqueeze squeeze_ unsqueeze_ flatten unflatten view_as diagonal lift_fresh result_type set_ swapaxes
    movedim numpy_T mT unfold broadcast_tensors resolve_conj resolve_neg is_same_size unsafe_split is_pinned
    contiguous to as_strided_ t_ transpose_ swapdims resize_as_ cudnn_is_acceptable record_stream
"""  # `to` and `contiguous` do their work in copy_, a child
VIEWS = frozenset("aten::" + name for name in _VIEWS.split())
"""operators that touch no element"""


@cache
def kernel_work(name: str) -> str:
    """gemm, attention, conv … by a kernel's name."""
    text = name.lower()
    if text.startswith(("triton_poi", "triton_red", "triton_per")):  # their names list what was fused, GEMMs too
        return "elementwise"
    return next((work for work, pattern in _KERNEL_PATTERNS if pattern.search(text)), "other")


@cache
def host_state(name: str, kind: str) -> str:
    """What the host does during a call: sync, comm, loader, slow, launch, view, code (autograd, compiled), op, python
    or annotation."""
    if _LOADER.search(name):
        return "loader"
    if kind in ("op", "annotation") and _COMM.search(name):
        return "comm"
    if kind == "runtime":
        return "sync" if _SYNC_CALLS.match(name) else "slow" if _SLOW_CALLS.search(name) else "launch"
    if kind == "op":
        return "sync" if name in _SYNC_OPS else "view" if name in VIEWS else "code" if _PRIVATE.match(name) else "op"
    return kind


@cache
def is_launch(name: str) -> bool:
    return bool(_LAUNCHES.search(name))


@cache
def is_plain_fp32(name: str) -> bool:
    """A GEMM in fp32 outside the matrix units, as cuBLAS, cuDNN and CUTLASS name them."""
    text = name.lower()
    return "tf32" not in text and "s1688" not in text and bool(_PLAIN_FP32.search(text))


@cache
def element_size(name: str) -> float:
    """Bytes per element of the tensors that a kernel over a list of tensors (cat, foreach, fused optimisers) reads; 0
    where its name does not tell."""
    match = _ELEMENT.search(name)
    if match is None:
        return 0
    return float(match[1]) if match[1] else _SIZES.get(match[2], 2)


def is_host_copy(name: str) -> bool:
    """Between host and device, in either direction."""
    return "HtoD" in name or "DtoH" in name or "Host" in name


_FUNCTORS = (
    re.compile(r"\b(?!Binary|Unary|BUnary|AUnary|OpMath)\w+Functor\b|\b\w+_functor\b"),
    re.compile(r"\w+_kernel_cuda\b|\w+_cuda_out\b"),
    re.compile(r"\w+(?:gemm|Gemm|conv|fprop|dgrad|wgrad)\w*"),
    re.compile(r"\w+(?:Functor|Ops?)\b"),
)
"""template arguments of a kernel, the most specific first"""


def short_name(name: str, longest: int = 70) -> str:
    """'elementwise_kernel (MulFunctor)': the function's own name, and what it does with each element."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    base, template, inside = plain.partition("<")
    if not template or base.startswith("aten::"):
        text = plain
    else:
        base = base.partition("(")[0].rsplit("::", 1)[-1]
        functor = next((match.group() for pattern in _FUNCTORS if (match := pattern.search(inside))), "")
        text = f"{base} ({functor})" if functor else base
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
