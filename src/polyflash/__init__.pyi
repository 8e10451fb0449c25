from polyflash.api import attention as attention
from polyflash.api import attention_paged as attention_paged
from polyflash.api import attention_varlen as attention_varlen
from polyflash.api import explain as explain
from polyflash.api import use_backend as use_backend
from polyflash.counting import counters as counters
from polyflash.counting import watch as watch
from polyflash.errors import SpecError as SpecError
from polyflash.errors import UnsupportedError as UnsupportedError
from polyflash.groups import GroupsPlan as GroupsPlan
from polyflash.groups import attention_groups as attention_groups
from polyflash.groups import explain_groups as explain_groups
from polyflash.mask import Mask as Mask
from polyflash.merging import AttentionOutput as AttentionOutput
from polyflash.merging import merge as merge
from polyflash.plan import Plan as Plan
from polyflash.quant.tensor import QuantizedTensor as QuantizedTensor
from polyflash.quant.tensor import dequantize as dequantize
from polyflash.quant.tensor import quantize as quantize
from polyflash.statistics import RowStats as RowStats
from polyflash.statistics import column_sums as column_sums
from polyflash.statistics import row_stats as row_stats

__version__: str
