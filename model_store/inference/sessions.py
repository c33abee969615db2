"""Sessions of onnxruntime: where they compute, with how many threads, and in how much memory."""

import onnxruntime as ort

CUDA, PROCESSORS = "CUDAExecutionProvider", "CPUExecutionProvider"
# products as exact as the processor's: TF32 keeps ten bits of a factor
PROVIDERS: dict[str, dict[str, str]] = {CUDA: {"use_tf32": "0"}, PROCESSORS: {}}


def bound_memory(most_bytes: int) -> None:
    """Let the graphs of sessions that are made from now on take so much memory together while they
    run, their weights apart: a preflight tries few numbers of rows, and memory may depend on it."""
    place = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(place, ort.OrtArenaCfg({"max_mem": most_bytes}))


def session_options(threads: int) -> ort.SessionOptions:
    """Return options of a session whose operators share threads, which wait busily for each other
    in a run, and burn no core after it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if threads > 1 else "0")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.use_env_allocators", "1")  # of `bound_memory`, if any
    return options


def is_on_gpu(session: ort.InferenceSession) -> bool:
    return bool(session.get_providers()[0] == CUDA)


def providers(on_processors: bool = False) -> list[tuple[str, dict[str, str]]]:
    """Return onnxruntime's providers to use, with options: CUDA where this build of it has it, and
    what it falls back to, the processor."""
    known = [PROCESSORS] if on_processors else ort.get_available_providers()
    return [(name, options) for name, options in PROVIDERS.items() if name in known]
