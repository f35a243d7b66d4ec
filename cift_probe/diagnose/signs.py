"""The signs of every kind of failure in a text, old and new wordings.

A sign stands in one line; where messages are long, it may run on over the next ones.
`triggers` are lower-case words of which one is in every text that the pattern can match: what has
none is not looked at. Gaps are bounded, so that no text makes a pattern slow. One table, longer
than other modules: what tells look-alikes apart is best read side by side.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from cift_probe.diagnose import architecture, memory

NAMES_IT, LIKELY, ASIDE = 3, 2, 1  # says it; may be another; a consequence, or harmless


class Sign(NamedTuple):
    """A pattern that means a kind, or that `decide` turns into one of several look-alikes."""

    kind: str
    strength: int
    triggers: tuple[str, ...]
    pattern: re.Pattern[str]
    unless: re.Pattern[str] | None = None
    decide: Callable[[str], str] | None = None
    runs_on: bool = False


SIGNS: list[Sign] = []


def _sign(
    kind: str,
    strength: int,
    triggers: str,
    pattern: str,
    *,
    unless: str = "",
    decide: Callable[[str], str] | None = None,
    runs_on: bool = False,
) -> None:
    """Register a sign; `triggers` are separated by "|"."""
    SIGNS.append(
        Sign(
            kind,
            strength,
            tuple(triggers.split("|")),
            re.compile(pattern, re.IGNORECASE),
            re.compile(unless, re.IGNORECASE) if unless else None,
            decide,
            runs_on,
        )
    )


def _oom(text: str) -> str:
    return memory.decide(memory.parse_figures(text))


_LIBRARY = (
    r"bitsandbytes|pythonInterface|\bops\.(?:cu|hip)\b|xformers|flash_attn|cudnn|rocblas|exllama"
)

# driver and CUDA start-up
_sign(
    "driver_too_old",
    NAMES_IT,
    "too old|insufficient|unsupported toolchain|unsupported_ptx_version|unsatisfied condition",
    r"NVIDIA driver on your system is too old|CUDA driver version is insufficient"
    r"|cudaErrorInsufficientDriver|PTX was compiled with an unsupported toolchain"
    r"|CUDA_ERROR_UNSUPPORTED_PTX_VERSION|unsatisfied condition: cuda ?>=",
    runs_on=True,
)
_sign(
    "forward_compat_unsupported",
    NAMES_IT,
    "error 804|forward compatib|compatnotsupported|compat_not_supported",
    r"\bError 804\b|forward compatibility was attempted on non.?supported HW"
    r"|cudaErrorCompatNotSupportedOnDevice|CUDA_ERROR_COMPAT_NOT_SUPPORTED",
)
_sign(
    "fabric_not_ready",
    NAMES_IT,
    "error 802|not yet initialized|systemnotready|system_not_ready|fabric",
    r"\bError 802\b|system not yet initialized|cudaErrorSystemNotReady|CUDA_ERROR_SYSTEM_NOT_READY"
    r"|fabric ?manager.{0,60}(?:fail|mismatch|not running|not match|inactive|does not)"
    r"|Fabric.{0,80}State *: *In Progress",
    runs_on=True,
)
_sign(
    "uvm_broken_after_suspend",
    LIKELY,
    "cuda unknown error|error 999|cudaerrorunknown|cuda_error_unknown",
    r"CUDA unknown error|\bError 999\b|cudaErrorUnknown\b|CUDA_ERROR_UNKNOWN\b",
)
_sign(
    "driver_library_mismatch",
    NAMES_IT,
    "version mismatch|api mismatch|error 803|systemdrivermismatch|unsupported display driver",
    r"Driver/library version mismatch|API mismatch: the (?:client|NVIDIA)|\bError 803\b"
    r"|cudaErrorSystemDriverMismatch|unsupported display driver ?/ ?cuda driver combination",
)
_sign(
    "device_cgroup_lost",
    NAMES_IT,
    "nvml",
    r"Failed to initialize NVML: Unknown Error|NVMLError_Unknown: Unknown Error"
    r"|nvml\w{0,40} failed.{0,20}: Unknown Error",
)

# architecture
_sign(
    "arch_missing",
    NAMES_IT,
    "not compatible with|cuda capability",
    r"(?:with CUDA capability sm_\d+ is not compatible with"
    r"|which is of cuda capability \d+\.\d).{0,200}",
    decide=architecture.decide,
    runs_on=True,
)
_sign(
    "library_arch_missing",
    NAMES_IT,
    "no kernel image|arch_mismatch|invalid device function|tensilelibrary",
    r"(?:no kernel image is available for execution|invalid device function).{0,200}"
    r"(?:" + _LIBRARY + ")"
    r"|CUDNN_STATUS_(?:NOT_SUPPORTED_)?ARCH_MISMATCH"
    r"|Cannot read .{0,200}TensileLibrary",
)
_sign(
    "arch_missing",
    NAMES_IT,
    "no kernel image|nokernelimage|no_binary_for_gpu|nobinaryforgpu|invalid device function"
    "|device kernel image is invalid",
    r"no kernel image is available|cudaErrorNoKernelImageForDevice|CUDA_ERROR_NO_BINARY_FOR_GPU"
    r"|hipErrorNoBinaryForGpu|CUDA error: invalid device function|device kernel image is invalid",
    unless=_LIBRARY,
)
_sign(
    "capability_unreadable",
    NAMES_IT,
    "compute_cap|compute capability",
    r"compute[_ ]cap(?:ability)?\W{1,12}\[?(?:N/A|Not Supported|Unknown Error)\]?",
)

# builds, libraries and versions
_sign(
    "cpu_only_wheel",
    NAMES_IT,
    "not compiled with cuda|not linked with support for cuda|cpu-only",
    r"Torch not compiled with CUDA enabled|not linked with support for cuda devices"
    r"|CPU-only (?:build|version|wheel) of (?:Py)?torch",
)
_sign(
    "package_version_conflict",
    NAMES_IT,
    "dependency resolver|resolutionimpossible|incompatible|is required|versionconflict|requirement"
    "|no solution found",
    r"pip's dependency resolver|ResolutionImpossible|pkg_resources\.\w{0,12}VersionConflict"
    r"|\S{1,60} [0-9.\w]{1,20} (?:requires|has requirement) .{1,80}, but you have"
    r"|is required for a normal functioning of this module|No solution found when resolving",
)
_sign(
    "package_version_conflict",
    LIKELY,
    "cannot import name|unexpected keyword argument|has no attribute",
    r"ImportError: cannot import name .{1,80} from '?(?:transformers|peft|trl|accelerate"
    r"|bitsandbytes|datasets|torch|huggingface_hub)"
    r"|TypeError: (?:SFT|Trainer|Training|Lora|BitsAndBytes|DPO|LlamaForCausalLM|AdamW)\w{0,30}"
    r"(?:\.\w{1,30})?\(?\)? ?(?:\.__init__\(\))? got an unexpected keyword argument"
    r"|TypeError: .{0,80}(?:Trainer|Config|Arguments)\.__init__\(\) got an unexpected keyword"
    r"|AttributeError: module '(?:transformers|peft|trl|accelerate|bitsandbytes|torch)"
    r"[\w.]{0,60}' has no attribute",
)
_sign(
    "compiled_package_mismatch",
    NAMES_IT,
    "torchvision|numpy.dtype size|numpy.ndarray size|using numpy 1|xformers|torchaudio"
    "|module compiled against",
    r"operator torchvision::\w{1,20} does not exist|numpy\.(?:dtype|ndarray) size changed"
    r"|compiled using NumPy 1\.x cannot be run in|xFormers (?:was built for|can't load)"
    r"|module compiled against (?:ABI|API) version"
    r"|undefined symbol.{0,120}(?:torchvision|torchaudio|xformers)"
    r"|(?:torchvision|torchaudio|xformers)\S{0,120}: undefined symbol"
    r"|PyTorch and torchvision (?:were|have been) compiled with different CUDA",
    runs_on=True,
)
_sign(
    "flash_attn_abi_mismatch",
    NAMES_IT,
    "flash_attn|flash-attn",
    r"flash_attn\w{0,20}\S{0,120}(?:: undefined symbol|: DLL load failed)"
    r"|DLL load failed while importing flash_attn"
    r"|undefined symbol.{0,160}flash_attn",
)
_sign(
    "bnb_binary_missing",
    NAMES_IT,
    "bitsandbytes|bnb_cuda|cadam|cquantize|configured cuda binary",
    r"libbitsandbytes\w{0,40}\.(?:so|dll)\S{0,3}[^\n]{0,60}"
    r"(?:not found|cannot open shared object|No such file|does not exist)"
    r"|(?:Could not find|not find) .{0,40}(?:libbitsandbytes|bitsandbytes CUDA binary)"
    r"|Configured CUDA binary not found|Required library version not found: libbitsandbytes"
    r"|bitsandbytes (?:library )?was (?:compiled|installed) without GPU support"
    r"|no attribute '?(?:cadam|cquantize|cdequantize|cget_col_row)"
    r"|CUDA Setup failed despite (?:GPU|CUDA) being available",
)
_sign(
    "bnb_platform_mismatch",
    NAMES_IT,
    "bitsandbytes",
    r"libbitsandbytes\S{0,80}.{0,40}(?:invalid ELF header|wrong ELF class|incompatible architecture"
    r"|cannot enable executable stack|Exec format error|not a valid Win32)",
)
_sign(
    "cuda_library_mismatch",
    NAMES_IT,
    "libcu|libnv|libnccl|cudnn|libtorch_cuda|nvjitlink|cublas|cusparse",
    r"lib(?:cu|nv|nccl)\w{1,30}\.so[\d.]{0,12}:? (?:cannot open shared object|undefined symbol"
    r"|version \S{1,40} not found)"
    r"|cuDNN version incompatibility|cuDNN.{0,60}compiled against.{0,60}found runtime version"
    r"|undefined symbol: (?:cublas|cusparse|cusolver|cudnn|nccl|__nvJitLink)\w{1,60}"
    r"|(?:Could not load library|Unable to load any of \{?)[ '\"]{0,3}lib(?:cu|nv)\w{1,30}"
    r"|Library lib(?:cu|nv)\w{1,30}\.so[\d.]{0,12} is not found",
)
_sign(
    "glibc_too_old",
    NAMES_IT,
    "glibc_",
    r"version [`'\"]?GLIBC_2\.\d{1,3}[`'\"]? not found|requires glibc >= ?2\.\d{1,3}",
)
_sign(
    "jit_toolchain_missing",
    NAMES_IT,
    "python.h|c compiler|cuda_home|nvcc: |nvcc'|cannot find -l|ninja is required|version for cl"
    "|gcc: |g++: |cc: |gcc'|g++'|'cc'|mismatches the version",
    r"Python\.h: No such file|Failed to find C compiler|CUDA_HOME environment variable is not set"
    r"|CUDA_HOME does not exist|nvcc\S{0,3}: (?:command )?not found"
    r"|No such file or directory: '\S{0,80}nvcc'|cannot find -l(?:cuda|cudart|c10|stdc\+\+)"
    r"|Ninja is required to load C\+\+ extensions|(?:gcc|g\+\+|cc): (?:command )?not found"
    r"|No such file or directory: '(?:gcc|g\+\+|cc|x86_64-linux-gnu-gcc)'"
    r"|detected CUDA version \(\S{1,8}\) mismatches the version that was used to compile"
    r"|Error checking compiler version for cl",
)

# bitsandbytes, attention and Triton
_sign(
    "managed_memory_unavailable",
    NAMES_IT,
    "pythoninterface|mallocmanaged",
    r"(?:operation not supported|out of memory|invalid argument|not permitted).{0,40}at line \d+"
    r" in file .{0,200}pythonInterface\.c|cudaMallocManaged.{0,60}(?:fail|not supported|error)",
)
_sign(
    "flash_attn_unsupported",
    NAMES_IT,
    "flashattention|flash_attn|flash attention",
    r"Flash ?Attention(?:-?2)? only supports? (?:Ampere|Turing|Hopper)"
    r"|Flash ?Attention (?:backward|forward) for head dim|Flash ?Attention only supports? head dim"
    r"|FlashAttention only supports? (?:fp16|torch\.float16)",
)
_sign(
    "packing_without_varlen_attention",
    ASIDE,
    "padding-free|padding_free|packing",
    r"(?:padding[-_]free|packing).{0,160}(?:attention implementation is not|flash.{0,40}(?:variant"
    r"|only implementation|recommended|supported)|contaminat)",
    runs_on=True,
)
_sign(
    "triton_ptxas_too_old",
    NAMES_IT,
    "ptxas",
    r"ptxas (?:fatal|error).{0,80}(?:is not defined for option 'gpu-name'|Unsupported \.target"
    r"|Unsupported gpu architecture)|ptxas.{0,120}Value 'sm_\d+a?' is not defined",
)
_sign(
    "triton_shared_memory",
    NAMES_IT,
    "out of resource|outofresources",
    r"out of resource: shared memory|OutOfResources\(?.{0,40}shared memory",
)
_sign(
    "triton_gpu_too_old",
    NAMES_IT,
    "triton",
    r"Triton only supports devices of CUDA Capability"
    r"|too old to be supported by the triton GPU compiler"
    r"|triton.{0,80}(?:requires|minimum).{0,40}(?:capability|sm_?)\W{0,4}7",
)

# number formats, gradients, adapters, labels
_sign(
    "triton_gpu_too_old",
    LIKELY,
    "llvm error",
    r"LLVM ERROR: Cannot select: intrinsic %llvm\.nvvm",
)
_sign(
    "bf16_unsupported",
    NAMES_IT,
    "support bf16|support bfloat16|_16bf|bfloat16 is |'.bf16'|bf16 is|bf16 mixed|bfloat16' |"
    "bfloat16 not",
    r"(?:setup|hardware|device|GPU).{0,30}(?:doesn't|does not|not) support (?:bf16|bfloat16)"
    r"|CUBLAS_STATUS_NOT_SUPPORTED.{0,200}CUDA_R_16BF"
    r"|Bfloat16 is only supported on GPUs|Feature '\.bf16' requires \.target sm_80"
    r"|bf16 (?:is|mixed precision).{0,20}not (?:supported|available)"
    r"|BFloat16'? (?:is )?not (?:implemented|supported) (?:for|on)",
)
_sign(
    "fp16_trainable_params",
    NAMES_IT,
    "unscale fp16",
    r"Attempting to unscale FP16 gradients",
)
_sign(
    "fp16_overflow",
    LIKELY,
    ": nan|:nan|=nan|= nan|'nan|\"nan|: inf|=inf|= inf|: -inf|gradient overflow|overflow! "
    "|contains either|is nan|are nan|became nan|is inf|are inf|became inf",
    r"(?<![a-z_])(?:train_)?(?:loss|grad_norm)['\"]?\s?[:=]\s?['\"]?(?:nan|-?inf)\b"
    r"|Gradient overflow\. +Skipping step|probability tensor contains either `?inf`?"
    r"|OVERFLOW! .{0,40}Skipping step|(?:loss|gradient)s? (?:is|are|became) (?:nan|inf)\b",
)
_sign(
    "checkpointing_no_input_grads",
    NAMES_IT,
    "requires_grad=true",
    r"None of the inputs have requires_grad=True",
)
_sign(
    "no_trainable_parameters",
    NAMES_IT,
    "trainable param|empty parameter list",
    r"trainable params: 0 |optimizer got an empty parameter list|No trainable param"
    r"|no parameters? (?:that )?requires? grad",
)
_sign(
    "checkpointing_no_input_grads",
    LIKELY,
    "does not require grad",
    r"element 0 of tensors does not require grad and does not have a grad_fn",
)
_sign(
    "adapter_target_missing",
    NAMES_IT,
    "target modules|target_modules|no modules were targeted",
    r"Target modules .{0,400}not found in the base model|No modules were targeted for adaptation"
    r"|target_modules.{0,200}(?:not found|no matching|did not match)",
    runs_on=True,
)
_sign(
    "tied_embeddings_broken",
    LIKELY,
    "tie_word_embeddings|lm_head.weight|tied weights|tied tensor|shared weights|shared tensor",
    r"tie_word_embeddings.{0,200}(?:both|but|no longer|mismatch)"
    r"|lm_head\.weight.{0,120}(?:newly initialized|MISSING)"
    r"|(?:tied|shared) (?:weights|tensors?).{0,80}(?:broken|no longer|mismatch)",
)
_sign(
    "embeddings_not_saved",
    LIKELY,
    "embed_tokens|save_embedding_layers|lm_head",
    r"size mismatch for \S{0,120}(?:embed_tokens|lm_head)"
    r"|save_embedding_layers.{0,80}(?:is False|not saved|set to)",
    runs_on=True,
)
_sign(
    "labels_all_masked",
    NAMES_IT,
    "all labels|all the labels|response key|response template|ignored in loss|no valid"
    "|no supervised",
    r"all (?:the )?labels .{0,40}(?:are|were|is) (?:-100|masked|ignored)"
    r"|Could not find response (?:key|template).{0,400}ignored in loss"
    r"|This instance will be ignored in loss calculation|no (?:valid|supervised) (?:labels|tokens)",
    runs_on=True,
)

_sign(
    "labels_all_masked",
    LIKELY,
    "eval_loss",
    r"eval_loss['\"]?\s?[:=]\s?['\"]?nan\b",
)

# device memory
_sign(
    "gpu_oom",
    NAMES_IT,
    "out of memory. tried to allocate",
    r"(?:CUDA|HIP|XPU|MPS)? ?(?:backend )?out of memory\. ?Tried to allocate",
    decide=_oom,
    runs_on=True,
)
_sign(
    "gpu_oom_nvml_assert",
    NAMES_IT,
    "nvml_success",
    r"NVML_SUCCESS ?== ?.{1,120}INTERNAL ASSERT FAILED.{0,80}CUDACachingAllocator",
    runs_on=True,
)
_sign(
    "expandable_segments_unsupported",
    NAMES_IT,
    "nvmldevicegetgpufabricinfo|cuda driver error|cumemcreate|cumemaddressreserve",
    r"nvmlDeviceGetGpuFabricInfo|CUDA driver error: (?:operation not supported|invalid device)"
    r"|cuMem(?:Create|AddressReserve|SetAccess).{0,80}(?:not supported|NOT_SUPPORTED)",
)
_sign(
    "gpu_oom_driver_level",
    NAMES_IT,
    "out of memory|error_out_of_memory|erroroutofmemory|errormemoryallocation",
    r"(?:CUDA|HIP|cuda runtime|CUDA driver) error:? ?(?:\(2\) ?: ?)?out of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory|cudaErrorMemoryAllocation",
    unless=r"Tried to allocate",
    runs_on=True,
)
_sign(
    "gpu_oom",
    LIKELY,
    "out of memory",
    r"OutOfMemoryError: (?:CUDA|HIP) out of memory\.?(?! ?Tried)"
    r"|(?:CUDA|HIP) out of memory\.(?! ?Tried)",
    unless=r"Tried to allocate",
    runs_on=True,
)
_sign(
    "cublas_alloc_failed",
    NAMES_IT,
    "cublas_status_alloc_failed|cublas_status_not_initialized|hipblas_status_alloc_failed",
    r"(?:CUBLAS|HIPBLAS)_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)",
)
_sign(
    "alloc_conf_ignored",
    ASIDE,
    "alloc_conf|expandable_segments",
    r"PYTORCH_(?:CUDA|HIP)_ALLOC_CONF is deprecated|expandable_segments not supported on this"
    r"|Unrecognized (?:CUDA|Caching)\w{0,12} ?Allocator option",
)
_sign(
    "pinned_memory_limit",
    LIKELY,
    "pin_memory|page-lock|hostalloc|hostregister|memlock",
    r"(?:cudaHostAlloc|cudaHostRegister|pin_memory|page-lock).{0,120}"
    r"(?:out of memory|fail|limit|Cannot allocate|resource)"
    r"|RLIMIT_MEMLOCK.{0,60}(?:low|small|limit)",
)

# host memory, shared memory, disk
_sign(
    "host_oom_cgroup",
    NAMES_IT,
    "memory cgroup|oomkilled|oom-kill|oom_kill|cgroup out-of-memory|exceeded job memory|memcg",
    r"Memory cgroup out of memory|OOMKilled|constraint=CONSTRAINT_MEMCG|oom_memcg="
    r"|Detected \d+ oom[-_]kill event|cgroup out-of-memory handler"
    r"|Exceeded (?:job|step) memory limit",
)
_sign(
    "host_oom_killer",
    NAMES_IT,
    "out of memory: kill|oom-kill|invoked oom-killer",
    r"Out of memory: Kill(?:ed)? process|invoked oom-killer|oom-kill:constraint=CONSTRAINT_NONE",
    unless=r"Memory cgroup|CONSTRAINT_MEMCG|oom_memcg",
)
_sign(
    "host_oom_killer",
    LIKELY,
    "code -9|code: -9|code=-9|code = -9|code (-9|code : -9|status 137|code 137|code: 137|sigkill"
    "|signal 9|exited with 137|exit 137",
    r"exit ?code ?[:=]? ?\(?-9\b|return ?code ?[:=]? ?-9\b"
    r"|exit(?:ed with)?(?: status| code)?:? ?137\b"
    r"|(?:killed|terminated) by signal (?:9|SIGKILL)|died with <Signals\.SIGKILL"
    r"|exitcode *: *-9\b|Signal 9 \(SIGKILL\)",
)
_sign("host_oom_killer", LIKELY, "killed", r"(?:^|[\]%s\s|])Killed\s*$")
_sign(
    "host_oom_alloc",
    NAMES_IT,
    "defaultcpuallocator|bad_alloc|cannot allocate memory|unable to allocate|memoryerror",
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|std::bad_alloc"
    r"|OSError: \[Errno 12\] Cannot allocate memory|Unable to allocate .{1,40} for an array"
    r"|^MemoryError\b|\bMemoryError(?::|$)|fork: Cannot allocate memory",
)
_sign(
    "shm_not_writable",
    NAMES_IT,
    "shm_open|/dev/shm",
    r"shm_open failed.{0,40}(?:Permission denied|Read-only)"
    r"|/dev/shm\S{0,80}.{0,60}(?:Permission denied|Read-only file system)"
    r"|(?:Permission denied|Read-only file system).{0,60}/dev/shm",
)
_sign(
    "shm_too_small",
    NAMES_IT,
    "shared memory|bus error|/dev/shm|shm_open",
    r"DataLoader worker .{0,60}killed by signal: Bus error|insufficient shared memory"
    r"|(?:Error while )?creating shared memory segment /dev/shm"
    r"|unable to (?:open|write to|mmap) .{0,20}shared memory"
    r"|No space left on device.{0,80}(?:/dev/shm|shared memory)"
    r"|/dev/shm\S{0,80}.{0,60}No space left on device",
    unless=r"Permission denied|Read-only",
)
_sign(
    "disk_full",
    NAMES_IT,
    "no space left|enospc|errno 28|quota exceeded|pytorchstreamwriter|unexpected pos",
    r"No space left on device|\bENOSPC\b|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]"
    r"|PytorchStreamWriter failed writing file|unexpected pos \d+ vs \d+",
    unless=r"/dev/shm|shared memory|shm_open",  # noqa: S108 - a text that is searched for
)

# reading devices, several GPUs, health
_sign(
    "nvml_no_permission",
    NAMES_IT,
    "insufficient permission",
    r"\[?Insufficient Permissions?\]?|NVML_ERROR_NO_PERMISSION|NVMLError_NoPermission",
)
_sign(
    "nvml_field_unsupported",
    ASIDE,
    "[n/a]|[not supported]|: n/a",
    r"\[(?:N/A|Not Supported)\]|^[\w .()/-]{3,40}: (?:N/A|Not Supported)$",
    unless=r"compute[_ ]cap",
)
_sign(
    "device_index_mismatch",
    NAMES_IT,
    "invalid device ordinal|invaliddevice|num_gpus|device id",
    r"invalid device ordinal|cudaErrorInvalidDevice\b|device >= 0 && device < num_gpus"
    r"|Invalid device id",
)
_sign(
    "p2p_name_rule",
    NAMES_IT,
    "4000 series",
    r"RTX 4000 series.{0,120}(?:doesn't|don't|does not|do not) support",
)
_sign(
    "p2p_unusable",
    NAMES_IT,
    "ipc handle|peer access|peeraccess|peer-to-peer",
    r"(?:failed to open|cannot open) CUDA IPC handle|peer access is not supported"
    r"|cudaErrorPeerAccessUnsupported|peer-to-peer.{0,80}(?:hang|hung|timed? ?out|refused|failed)"
    r"|Cuda failure.{0,40}'?peer access",
)
_sign(
    "pcie_link_slow",
    LIKELY,
    "pcie|lnksta",
    r"available PCIe bandwidth, limited by|PCIe link.{0,60}(?:downgraded|degraded|downtrained)"
    r"|LnkSta:.{0,60}\(downgraded\)|pcie.{0,30}width.{0,30}degraded",
)
_sign(
    "nccl_system_error",
    ASIDE,
    "ncclsystemerror|unhandled system error",
    r"ncclSystemError|unhandled system error",
)
_sign(
    "gpu_fell_off_bus",
    NAMES_IT,
    "fallen off the bus|xid (|gpu is lost|gpu_is_lost",
    r"fallen off the bus|Xid \(PCI:[0-9a-fA-F:.]{1,20}\): 79\b|GPU is lost|NVML_ERROR_GPU_IS_LOST",
)
_sign(
    "ecc_uncorrectable",
    NAMES_IT,
    "ecc error|eccuncorrect|ecc_uncorrect|double bit|xid (|row remap",
    r"uncorrectable (?:NVLink |DRAM |SRAM )?ECC error|cudaErrorECCUncorrectable"
    r"|CUDA_ERROR_ECC_UNCORRECTABLE|Xid \(PCI:[0-9a-fA-F:.]{1,20}\): (?:48|64|94|95|140)\b"
    r"|Double Bit ECC|row remap\w{0,6}.{0,20}fail",
)
_sign(
    "thermal_throttle",
    LIKELY,
    "thermal|throttl",
    r"(?:HW|SW) Thermal Slowdown *: *Active"
    r"|clocks?.{0,40}throttl\w{1,4}.{0,40}(?:thermal|temperature)"
    r"|(?:thermal|temperature).{0,40}throttl",
)
_sign(
    "persistence_mode_off",
    ASIDE,
    "persistence",
    r"persistence mode is (?:disabled|off)|Persistence Mode *: *Disabled",
)
_sign(
    "compute_mode_exclusive",
    NAMES_IT,
    "busy or unavailable|devicesunavailable|exclusive_process",
    r"all CUDA-capable devices are busy or unavailable|cudaErrorDevicesUnavailable"
    r"|CUDA-capable device\(s\) is/are busy or unavailable"
    r"|Exclusive_Process.{0,80}(?:busy|another)",
)
TRIGGERS = tuple(sorted({word for sign in SIGNS for word in sign.triggers}))
