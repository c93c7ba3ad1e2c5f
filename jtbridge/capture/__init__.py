"""Capture of torch functions: their result types, their traits, and their forward and backward graphs."""

from ._aten_graph import aten_graph
from ._attempts import GraphUse
from ._closures import closed_over_modules, device_closed_over
from ._constants import large_constants, lift_constants, with_places_for
from ._data_dependent import is_data_dependent
from ._forward_graph import forward_graph
from ._graph_function import GraphFunction
from ._infer import infer
from ._joint import split_or_reason
from ._packing import from_bytes, to_bytes
from ._partition import Split
from ._probe import check_differentiable, probe_vmap
from ._request import TraceRequest, Trial
from ._trace import examples, trace_on
from ._unused_results import without_cotangents
from .chains import FUNCTIONS as FUSABLE_FUNCTIONS
from .modes.effects import draws
from .modes.exceptions import refuse_higher_order
from .modes.higher_order import HigherOrderInOperators
from .modes.provenance import origin
from .rewrites.rounded_once import materialized_tensor
