"""The fused form of `hstu_attn.layer.HSTULayer`: one autograd function for a whole layer.

steps            the functions that a layer computes between its matrix products and attention, and
                 the choice of their implementation for a tensor
torch_steps      the steps in plain torch, on any device: their definition
triton_steps     the steps on GPUs, one pass over memory each; triton_kernels has the kernels
settings         a call's settings, and the tensors that its forward saves for its backward
operator         the layer's forward and backward, as operators and as an autograd function
"""
