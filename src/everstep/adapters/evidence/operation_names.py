"""Codes and names of what the operation ring holds: PyTorch's own names, as its flight recorder writes them."""

OPERATIONS = (
    "unknown",
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "_all_gather_base",
    "all_gather_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "recv_any_source",
)
SEND, RECEIVE, RECEIVE_ANY = (OPERATIONS.index(name) for name in ("send", "recv", "recv_any_source"))
SIZES_MAY_DIFFER = frozenset({"all_to_all", "scatter", "gather", "reduce_scatter", "all_gather"})
"""Their sizes may differ between ranks; they are left out of signatures."""

DTYPES = (
    *("unknown", "float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"),
)
REDUCE_OPS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
"""By PyTorch's `RedOpType` plus 1; 0 for operations that reduce nothing."""


def operation_name(code: int) -> str:
    return OPERATIONS[code] if code < len(OPERATIONS) else "unknown"


def dtype_name(code: int) -> str:
    return DTYPES[code] if code < len(DTYPES) else "unknown"


def reduce_name(code: int) -> str:
    return REDUCE_OPS[code] if code < len(REDUCE_OPS) else "unknown"
