"""The schema of TensorFlow Lite: names of operators by code, element types, and options by slot.

https://github.com/google-ai-edge/LiteRT/blob/main/tflite/converter/schema/schema.fbs, version 3.
"""

from __future__ import annotations

# Names of operators, in the order of their codes.
CODES = """
ADD AVERAGE_POOL_2D CONCATENATION CONV_2D DEPTHWISE_CONV_2D DEPTH_TO_SPACE DEQUANTIZE EMBEDDING_LOOKUP FLOOR
FULLY_CONNECTED HASHTABLE_LOOKUP L2_NORMALIZATION L2_POOL_2D LOCAL_RESPONSE_NORMALIZATION LOGISTIC LSH_PROJECTION LSTM
MAX_POOL_2D MUL RELU RELU_N1_TO_1 RELU6 RESHAPE RESIZE_BILINEAR RNN SOFTMAX SPACE_TO_DEPTH SVDF TANH CONCAT_EMBEDDINGS
SKIP_GRAM CALL CUSTOM EMBEDDING_LOOKUP_SPARSE PAD UNIDIRECTIONAL_SEQUENCE_RNN GATHER BATCH_TO_SPACE_ND
SPACE_TO_BATCH_ND TRANSPOSE MEAN SUB DIV SQUEEZE UNIDIRECTIONAL_SEQUENCE_LSTM STRIDED_SLICE BIDIRECTIONAL_SEQUENCE_RNN
EXP TOPK_V2 SPLIT LOG_SOFTMAX DELEGATE BIDIRECTIONAL_SEQUENCE_LSTM CAST PRELU MAXIMUM ARG_MAX MINIMUM LESS NEG PADV2
GREATER GREATER_EQUAL LESS_EQUAL SELECT SLICE SIN TRANSPOSE_CONV SPARSE_TO_DENSE TILE EXPAND_DIMS EQUAL NOT_EQUAL LOG
SUM SQRT RSQRT SHAPE POW ARG_MIN FAKE_QUANT REDUCE_PROD REDUCE_MAX PACK LOGICAL_OR ONE_HOT LOGICAL_AND LOGICAL_NOT
UNPACK REDUCE_MIN FLOOR_DIV REDUCE_ANY SQUARE ZEROS_LIKE FILL FLOOR_MOD RANGE RESIZE_NEAREST_NEIGHBOR LEAKY_RELU
SQUARED_DIFFERENCE MIRROR_PAD ABS SPLIT_V UNIQUE CEIL REVERSE_V2 ADD_N GATHER_ND COS WHERE RANK ELU REVERSE_SEQUENCE
MATRIX_DIAG QUANTIZE MATRIX_SET_DIAG ROUND HARD_SWISH IF WHILE NON_MAX_SUPPRESSION_V4 NON_MAX_SUPPRESSION_V5
SCATTER_ND SELECT_V2 DENSIFY SEGMENT_SUM BATCH_MATMUL PLACEHOLDER_FOR_GREATER_OP_CODES CUMSUM CALL_ONCE BROADCAST_TO
RFFT2D CONV_3D IMAG REAL COMPLEX_ABS HASHTABLE HASHTABLE_FIND HASHTABLE_IMPORT HASHTABLE_SIZE REDUCE_ALL
CONV_3D_TRANSPOSE VAR_HANDLE READ_VARIABLE ASSIGN_VARIABLE BROADCAST_ARGS RANDOM_STANDARD_NORMAL BUCKETIZE
RANDOM_UNIFORM MULTINOMIAL GELU DYNAMIC_UPDATE_SLICE RELU_0_TO_1 UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_MAX
UNSORTED_SEGMENT_SUM ATAN2 UNSORTED_SEGMENT_MIN SIGN BITCAST BITWISE_XOR RIGHT_SHIFT STABLEHLO_LOGISTIC STABLEHLO_ADD
STABLEHLO_DIVIDE STABLEHLO_MULTIPLY STABLEHLO_MAXIMUM STABLEHLO_RESHAPE STABLEHLO_CLAMP STABLEHLO_CONCATENATE
STABLEHLO_BROADCAST_IN_DIM STABLEHLO_CONVOLUTION STABLEHLO_SLICE STABLEHLO_CUSTOM_CALL STABLEHLO_REDUCE STABLEHLO_ABS
STABLEHLO_AND STABLEHLO_COSINE STABLEHLO_EXPONENTIAL STABLEHLO_FLOOR STABLEHLO_LOG STABLEHLO_MINIMUM STABLEHLO_NEGATE
STABLEHLO_OR STABLEHLO_POWER STABLEHLO_REMAINDER STABLEHLO_RSQRT STABLEHLO_SELECT STABLEHLO_SUBTRACT STABLEHLO_TANH
STABLEHLO_SCATTER STABLEHLO_COMPARE STABLEHLO_CONVERT STABLEHLO_DYNAMIC_SLICE STABLEHLO_DYNAMIC_UPDATE_SLICE
STABLEHLO_PAD STABLEHLO_IOTA STABLEHLO_DOT_GENERAL STABLEHLO_REDUCE_WINDOW STABLEHLO_SORT STABLEHLO_WHILE
STABLEHLO_GATHER STABLEHLO_TRANSPOSE DILATE STABLEHLO_RNG_BIT_GENERATOR REDUCE_WINDOW STABLEHLO_COMPOSITE
STABLEHLO_SHIFT_LEFT STABLEHLO_CBRT
"""
NAMES = CODES.split()

# Element types by code; None has no dtype here.
DTYPES = (
    "float32", "float16", "int32", "uint8", "int64", None, "bool", "int16", None, "int8", "float64", None, "uint64",
    None, None, "uint32", "uint16", "int8", "bfloat16",
)  # fmt: skip
TYPE_NAMES = (
    "FLOAT32", "FLOAT16", "INT32", "UINT8", "INT64", "STRING", "BOOL", "INT16", "COMPLEX64", "INT8", "FLOAT64",
    "COMPLEX128", "UINT64", "RESOURCE", "VARIANT", "UINT32", "UINT16", "INT4", "BFLOAT16",
)  # fmt: skip
INT4 = 17

# Options of an operator: the number of their table in the union, and its fields by slot as NAME:KIND=DEFAULT, with the
# kinds of struct, "*" for a vector and "s" for a text. Fields "_" change no result here.
OPTIONS: dict[str, tuple[int, str]] = {
    "ADD": (11, "activation:b"),
    "AVERAGE_POOL_2D": (5, "padding:b stride_w:i stride_h:i filter_width:i filter_height:i activation:b"),
    "BATCH_MATMUL": (101, "adj_x:? adj_y:?"),
    "BIDIRECTIONAL_SEQUENCE_LSTM": (69, "activation:b cell_clip:f proj_clip:f merge_outputs:? time_major:?=1"),
    "CALL": (16, "subgraph:I"),
    "CALL_ONCE": (103, "init_subgraph_index:i"),
    "CONCATENATION": (10, "axis:i activation:b"),
    "CONV_2D": (1, "padding:b stride_w:i stride_h:i activation:b dilation_w_factor:i=1 dilation_h_factor:i=1"),
    "CONV_3D": (
        106,
        (
            "padding:b stride_d:i stride_w:i stride_h:i activation:b "
            "dilation_d_factor:i=1 dilation_w_factor:i=1 dilation_h_factor:i=1"
        ),
    ),
    "CUMSUM": (102, "exclusive:? reverse:?"),
    "DEPTHWISE_CONV_2D": (
        2,
        "padding:b stride_w:i stride_h:i depth_multiplier:i activation:b dilation_w_factor:i=1 dilation_h_factor:i=1",
    ),
    "DEPTH_TO_SPACE": (94, "block_size:i"),
    "DIV": (29, "activation:b"),
    "FAKE_QUANT": (58, "min:f max:f num_bits:i narrow_range:?"),
    "FULLY_CONNECTED": (8, "activation:b weights_format:b keep_num_dims:?"),
    "GATHER": (23, "axis:i batch_dims:i"),
    "GELU": (116, "approximate:?"),
    "IF": (92, "then_subgraph_index:i else_subgraph_index:i"),
    "L2_NORMALIZATION": (12, "activation:b"),
    "L2_POOL_2D": (5, "padding:b stride_w:i stride_h:i filter_width:i filter_height:i activation:b"),
    "LEAKY_RELU": (75, "alpha:f"),
    "LOCAL_RESPONSE_NORMALIZATION": (13, "radius:i bias:f alpha:f beta:f"),
    "MAX_POOL_2D": (5, "padding:b stride_w:i stride_h:i filter_width:i filter_height:i activation:b"),
    "MEAN": (27, "keep_dims:?"),
    "MIRROR_PAD": (77, "mode:b"),
    "MUL": (21, "activation:b"),
    "ONE_HOT": (61, "axis:i"),
    "PACK": (59, "_ axis:i"),
    "REDUCE_ALL": (27, "keep_dims:?"),
    "REDUCE_ANY": (27, "keep_dims:?"),
    "REDUCE_MAX": (27, "keep_dims:?"),
    "REDUCE_MIN": (27, "keep_dims:?"),
    "REDUCE_PROD": (27, "keep_dims:?"),
    "RESHAPE": (17, "new_shape:*i"),
    "RESIZE_BILINEAR": (15, "_ _ align_corners:? half_pixel_centers:?"),
    "RESIZE_NEAREST_NEIGHBOR": (74, "align_corners:? half_pixel_centers:?"),
    "REVERSE_SEQUENCE": (87, "seq_dim:i batch_dim:i"),
    "SOFTMAX": (9, "beta:f"),
    "SPACE_TO_DEPTH": (19, "block_size:i"),
    "SQUEEZE": (30, "squeeze_dims:*i"),
    "STRIDED_SLICE": (32, "begin_mask:i end_mask:i ellipsis_mask:i new_axis_mask:i shrink_axis_mask:i offset:?"),
    "SUB": (28, "activation:b"),
    "SUM": (27, "keep_dims:?"),
    "TRANSPOSE_CONV": (49, "padding:b stride_w:i stride_h:i activation:b"),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": (
        71,
        "activation:b cell_clip:f proj_clip:f time_major:? _ diagonal_recurrent_tensors:?",
    ),
    "UNIDIRECTIONAL_SEQUENCE_RNN": (31, "time_major:? activation:b"),
    "UNPACK": (64, "num:i axis:i"),
    "VAR_HANDLE": (111, "_ shared_name:s"),
    "WHILE": (93, "cond_subgraph_index:i body_subgraph_index:i"),
}
