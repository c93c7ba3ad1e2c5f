"""The names of the backends, for files that the backends themselves import, and for the doctor.

The doctor lists its checks without the backends, whose import may fail. Code that chooses a backend asks
`jtbridge/_backends/_registry.py`. A test compares this table with the backends.
"""

WITH_KERNELS = "triton"
WITHOUT_KERNELS = "xla"
ON_DEVICE = "dlpack"
ON_HOST = "callback"

TRANSLATING = (WITH_KERNELS, WITHOUT_KERNELS)  # in the order in which "auto" prefers them
CALLING = (ON_DEVICE, ON_HOST)
