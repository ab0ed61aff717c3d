"""Public functions as leaves of `torch.fx.symbolic_trace`.

A symbolic trace runs a model's Python code on proxies, whose shapes and dtypes cannot be checked.
A public function therefore records its call, if an argument is a proxy, as one `call_function` node
with keyword arguments, and returns the proxy of the result:

    if isinstance(q, Proxy):
        return record_call(hstu_attention, (q,), **locals())

This works however the caller has imported the function, while `torch.fx.wrap` works for the names
of one module only. An eager call costs one `isinstance`. `record_call` passes the call to the
proxy's `__torch_function__`, the protocol for functions that are not torch's own.
"""

import torch.fx
from torch.overrides import handle_torch_function as record_call

__all__ = ["Proxy", "record_call"]

# NOTE: `type`, since mypy knows that no Tensor is a Proxy and takes the branch for unreachable.
Proxy: type = torch.fx.Proxy
