"""Other libraries' names for our ops: code that was written for them runs on these kernels.

linattn_tl.compat.fast_transformers   modules named, called and answering as in pytorch-fast-transformers
linattn_tl.compat.fla                 functions named, called and answering as in flash-linear-attention
linattn_tl.compat.transformers        enable(): models of Hugging Face transformers use our ops
"""
