"""Public functions as leaves of `torch.fx.symbolic_trace`.

A symbolic trace runs a model's Python code on proxies, which have no shape or dtype that checks
could look at. So a public function that is given a proxy records the call of itself, as one
`call_function` node with the arguments by name, and returns the proxy of the result:

    if isinstance(q, Proxy):
        return record_call(hstu_attention, (q,), **locals())

It does so wherever the caller has the name from, which `torch.fx.wrap` does for one module's names
only, and for an eager call it costs one `isinstance`. `record_call` is the protocol for functions
that are not torch's own: it passes the call to the proxy's `__torch_function__`.
"""

import torch.fx
from torch.overrides import handle_torch_function as record_call

__all__ = ["Proxy", "record_call"]

# NOTE: `type`, since mypy knows that no Tensor is a Proxy and takes the branch for unreachable.
Proxy: type = torch.fx.Proxy
