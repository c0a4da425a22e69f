"""The truth, in NumPy float64: attention, its gradients, the online softmax, and the tiled walks with their traces.

Every function also runs in float32. Then each sum is taken with one accumulator in the order of its index, as three
nested loops would, because that is what "plain float32 arithmetic" means here and what the WGSL kernels do.
"""

from fa2lab.reference.arithmetic import scores
from fa2lab.reference.backward import TrueGradients, attention_backward, gradients, trace_backward, walk_backward
from fa2lab.reference.forward import Truth, attend, attention, states, tiled, walk
from fa2lab.reference.softmax import State, merge, online
from fa2lab.reference.trace import trace_forward

__all__ = [
    "State",
    "TrueGradients",
    "Truth",
    "attend",
    "attention",
    "attention_backward",
    "gradients",
    "merge",
    "online",
    "scores",
    "states",
    "tiled",
    "trace_backward",
    "trace_forward",
    "walk",
    "walk_backward",
]
