"""The promises of the five documents, in our words: section, promise, and the probe of its effect."""

from __future__ import annotations

from typing import NamedTuple


class Promise(NamedTuple):
    """One promise of a section of a document."""

    document: str
    section: str
    text: str
    probe: str


DOCUMENTS: dict[str, str] = {
    "Optimization": """
        Operator Fusion | compatible operations are joined: fewer launches | fusion
        Operator Fusion | joined operations move fewer bytes | fusion_bytes
        Dead Code Elimination | a layer that no output needs is not computed | dead_code
        Dead Code Elimination | such a layer has no parameters either | dead_interface
        Common Subexpression Elimination | repeated computations run once | common_subexpression
        Operation Specialization | a dimension of 1 selects another operation | specialization
        Parallelization | element-wise operations use several threads | threads
        Kernel Selection | each large operation gets its fastest kernel | high_in_time
        In-place Operations | activations need no memory of their own | in_place
        In-place Operations | `Relu(in_place=True)` on one name | in_place_option
        Memory Planning | `memory_planning`: the plan of an arena | memory_planning
        Memory Planning | values that are not alive at once share memory | lifetimes
        Memory Formats | row or column order by the way it is read | weight_order
        Memory Formats | packed sparse tensors | packed_weights
        Memory Formats | `memory_format`: channels last for convolutions | image_order
        JAX Backend | compiled just in time | jit
        JAX Backend | `vectorize`: vmap | vectorize
        JAX Backend | TPU as the target | target_tpu
        PyTorch Backend | TorchScript | torchscript
        PyTorch Backend | automatic mixed precision | amp
        PyTorch Backend | kernels of the device | gpu
        Other Backends | vector instructions in C | vectorized_cpu
        Optimization Levels | `"none"`: nothing, for debugging | level_none
        Optimization Levels | `"low"`: basic optimizations | level_low
        Optimization Levels | `"medium"`: the default does more | level_medium
        Optimization Levels | `"medium"` is not slower than `"none"` | medium_in_time
        Optimization Levels | `"high"` does still more | level_high
        Optimization Levels | `"high"` is not slower than `"medium"` | high_in_time
        Disabling Specific Optimizations | `optimizations={"fusion": False}` | fusion
        Optimization Hints | `input_batch_size_range` | batch_hint
        Optimization Hints | `inference_priority` | priority_hint
        Analyzing Compilation | `verbose` prints the steps | verbose
        Runtime Profiling | `ml.profile` times each operation | profile
        Best Practices | `shapes` let the program be built at once | shapes_given
        Best Practices | batches are faster than single rows | rows_at_once
        Best Practices | compiled models are used again | reuse
        Custom Optimization Passes | `custom_passes` | custom_pass
        Hardware-specific Optimizations | `target_hardware="tpu"` | target_tpu
        Hardware-specific Optimizations | `cpu_options`: threads | thread_option
        Hardware-specific Optimizations | `cpu_options`: vectors | vectorized_cpu
        Future Directions | training in mixed precision | amp_training
        Future Directions | training with quantization | quantization_aware
        Future Directions | sizes that change from call to call | dynamic_shapes
        Future Directions | several devices | data_parallel
        Future Directions | tuning | tuning
    """,
    "Compilation": """
        Compilation Revolution | one model for every backend | one_model
        Compilation Pipeline | seven steps | seven_steps
        Shape Information | `shapes` | shapes_given
        Type Information | `types={"input": float16}` | inputs_of_half_precision
        Static Shapes | `static_shapes` | static_shapes
        JIT Compilation | `jit` | jit
        JIT Compilation | it is faster | jit_in_time
        JAX Optimizations | `static_argnums` | static_argnums
        JAX Optimizations | `donate_argnums` uses buffers again | donation
        PyTorch Optimizations | `"inductor"`, `"max-autotune"` | inductor
        Memory Optimization | `gradient_checkpointing` needs less memory | checkpointing
        Memory Optimization | it recomputes values | checkpoint_decision
        Memory Optimization | `memory_planning="greedy"` | memory_planning
        Mixed Precision | `precision="bfloat16"` halves the bytes | precision
        Mixed Precision | it is faster where weights are read from memory | half_in_time
        Mixed Precision | small networks are not slower | half_networks_in_time
        Mixed Precision | `mixed_precision` | mixed_precision
        Static Inference | `inference` | inference_mode
        Static Inference | `inference` is not slower | inference_in_time
        Static Inference | `static_inference` | static_inference
        Static Inference | `static_inference` is not slower | static_in_time
        Output Code Generation | `file_path` | file_path
        Compiled Model API | parameters, outputs, gradients, shapes, types | interface
        Graph Optimization | `constant_folding` | constant_folding
        Graph Optimization | `operator_fusion` | fusion
        Graph Optimization | `dead_code_elimination` | switch_dead_code
        Graph Optimization | `common_subexpression` | common_subexpression
        Hardware Targeting | `target_hardware="nvidia_a100"` | target_gpu
        Hardware Targeting | `optimize_for` | priority_hint
        Common Errors | a shape that cannot be inferred | shape_error
        Common Errors | a mismatch of types | type_error
        Common Errors | no memory, with a remedy | memory_error
        Common Errors | a time limit | timeout
    """,
    "Performance tuning": """
        Bottlenecks | `profile=True`, `get_profile_stats()` | profile_stats
        JIT Compilation | `jit` | jit
        JIT Compilation | it is one of the best ways to be faster | jit_in_time
        JAX Backend | `static_argnums` | static_argnums
        JAX Backend | `donate_argnums` | donation
        PyTorch Backend | `"inductor"`, `"max-autotune"` | inductor
        GPU Optimization | `device="cuda"` | gpu
        GPU Optimization | `target_hardware="nvidia_a100"` | target_gpu
        TPU Optimization | `tpu_replicas` | target_tpu
        TPU Optimization | `xla_optimization_level` | xla_level
        Operator Fusion | `operator_fusion` | fusion
        Operator Fusion | `constant_folding` | constant_folding
        Operator Fusion | `dead_code_elimination` | switch_dead_code
        Operator Fusion | `common_subexpression` | common_subexpression
        Static Shapes and Types | `static_shapes` | static_shapes
        Static Shapes and Types | `static_types` | static_types
        Precision Control | `precision="bfloat16"` | precision
        Precision Control | it is faster where weights are read from memory | half_in_time
        Precision Control | small networks are not slower | half_networks_in_time
        Precision Control | `mixed_precision` | mixed_precision
        Data Parallelism | `parallelism="data"` | data_parallel
        Model Parallelism | `parallelism="model"` | model_parallel
        Pipeline Parallelism | `parallelism="pipeline"` | pipeline_parallel
        Gradient Accumulation | a larger batch in parts | accumulation
        Efficient Data Loading | shuffled, pinned, prefetched batches | data_loader
        Efficient Data Loading | `num_workers` load at once | workers
        Inference-Only Mode | `inference`: no gradients, fewer launches | inference_mode
        Inference-Only Mode | it is not slower | inference_in_time
        Inference-Only Mode | `static_inference` is not slower | static_in_time
        Batch Size Optimization | one model for all batch sizes | batch_loop
        JAX tips | `pjit` | pjit
        JAX tips | `vectorize` | vectorize
        PyTorch tips | cuDNN and AMP | cudnn
        PyTorch tips | `torch_fx` | torch_fx
        PyTorch tips | `torch_dynamo` | torch_dynamo
        GGML/C tips | `quantize="int8"` | quantized
        GGML/C tips | `mem_size` | memory_of_ggml
        GGML/C tips | `graph_optimization` | graph_optimization
        Performance Benchmarking | throughput, latency, memory | benchmark
    """,
    "Advanced compilation": """
        Specifying Types | `types={"input": float16}` | inputs_of_half_precision
        Dynamic Shapes | an open batch | dynamic_shapes
        Static Shapes | `static_shapes` | static_shapes
        Compilation Caching | `cache`, `cache_dir` | program_cache
        Multiple Shapes | a shape for each input | many_inputs
        Enabling Optimizations | `constant_folding` | constant_folding
        Enabling Optimizations | `operator_fusion` | fusion
        Enabling Optimizations | `dead_code_elimination` | switch_dead_code
        Enabling Optimizations | `common_subexpression` | common_subexpression
        Dump Optimized Graph | `dump_graph`, `dump_format` | dump_graph
        Generate Code to File | `file_path` | file_path
        Custom Templates | `template_path` | template
        Modify Generated Code | `code_transformers` | code_transformer
        JAX-Specific Options | `jax_options` | jax_options
        PyTorch-Specific Options | AMP | amp
        PyTorch-Specific Options | cuDNN | cudnn
        PyTorch-Specific Options | `graph_mode`, `script_optimization` | torchscript
        Multi-Backend Compilation | `backend_map` | several_engines
        GPU Target | `target_hardware="nvidia_a100"` | target_gpu
        TPU Target | `target_hardware="tpu_v4"` | target_tpu
        Mobile Target | `target_hardware="mobile"` | mobile
        Gradient Checkpointing | less memory | checkpointing
        Memory Planning | `memory_planning` | memory_planning
        Memory Planning | `max_memory_gb` | memory_limit
        Memory Planning | the limit is that of the memory which calls take | memory_figure
        Conditionals | `If` | branches
        Loops | `While` | loops
        Verbose Mode | `verbose` | verbose
        Intermediate Outputs | `save_intermediates` | intermediates
        Shape Tracing | `trace_shapes` | shape_trace
        Profiling Compilation | `profile_output` | profile_file
        Advanced Visualization | `visualize`, `viz_options` | drawing
    """,
    "MLX optimization guide": """
        MlxMemoryOptimizer | tensors are used again | mlx_pool
        MlxMemoryOptimizer | the size of the pool is limited | mlx_pool_size
        MlxMemoryOptimizer | statistics | mlx_pool_statistics
        MlxMemoryOptimizer | the layout of batches | mlx_batch_layout
        MlxProfiler | averages, ranges, counts | mlx_profiler
        MlxProfiler | times are those of computed results | mlx_profiler_evaluates
        MlxKernelFusion | patterns of bias, sums and activations | mlx_fusion
        MlxKernelFusion | sequences without a pattern | mlx_no_fusion
        Custom Fusion Patterns | patterns of the user | mlx_own_pattern
        MlxTensorCache | entries are limited in number and age | mlx_cache
        MlxTensorCache | tensors are computed once | mlx_cache_computes_once
        MlxAutoTuner | the fastest configuration is kept | mlx_tuner
        MlxBatchOptimizer | batches that fit into memory | mlx_batch_size
        MlxBatchOptimizer | data is processed in batches | mlx_batches
        Graph Construction | a builder of graphs | mlx_graph
        Graph Analysis | order of execution | mlx_order
        Graph Analysis | fusion opportunities | mlx_opportunities
        Graph Analysis | their speed-up is measured | mlx_measured_opportunity
        Graph Analysis | memory layout | mlx_layout
        Graph Analysis | execution plan | mlx_plan
        Complete Workflow | runs more than once | mlx_workflow
    """,
}

PROMISES = [
    Promise(document, *(part.strip() for part in line.split("|")))
    for document, lines in DOCUMENTS.items()
    for line in lines.strip().splitlines()
]
