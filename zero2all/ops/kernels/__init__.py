"""Our Triton kernels, one file per operator: a forward and a backward kernel, and the autograd function around them.

Nothing here is imported unless the registry chose it, so that the package runs where Triton is not installed. All
kernels read each input once and write each output once, do their arithmetic in float32, add nothing up by atomics (the
same input gives the same bits), and run on the CPU as well through Triton's interpreter (`TRITON_INTERPRET=1`), where
the tests compare them with float64.
"""
