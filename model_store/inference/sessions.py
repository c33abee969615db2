"""Devices, threads and memory for onnxruntime sessions."""

import logging

import onnxruntime as ort

from model_store.inference.graphs import GraphError

logger = logging.getLogger("dubito")

CUDA, PROCESSORS = "CUDAExecutionProvider", "CPUExecutionProvider"
# TF32 would round factors to ten bits.
PROVIDERS: dict[str, dict[str, str]] = {CUDA: {"use_tf32": "0"}, PROCESSORS: {}}


def limit_session_memory(max_bytes: int) -> None:
    """Limit the memory for running graphs in all sessions that are loaded after this call.

    Preflights are not sufficient, because memory can depend on the number of rows.
    """
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"max_mem": max_bytes}))


def session_options(threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if threads > 1 else "0")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.use_env_allocators", "1")  # see above
    return options


def is_on_gpu(session: ort.InferenceSession) -> bool:
    return bool(session.get_providers()[0] == CUDA)


def providers(on_processors: bool = False) -> list[tuple[str, dict[str, str]]]:
    """List onnxruntime's execution providers, with CUDA first if it is available."""
    available = [PROCESSORS] if on_processors else ort.get_available_providers()
    return [(name, options) for name, options in PROVIDERS.items() if name in available]


def load_session(
    file: str, content: bytes, threads: int = 1, on_processors: bool = False
) -> ort.InferenceSession:
    preferred = providers(on_processors)
    try:
        session = ort.InferenceSession(content, session_options(threads), providers=preferred)
    except Exception:
        raise GraphError(file, "onnxruntime cannot load it") from None
    if preferred[0][0] == CUDA and not is_on_gpu(session):
        logger.warning("%s is not available; using the CPU", CUDA)
    return session
