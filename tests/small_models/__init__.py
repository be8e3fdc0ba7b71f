"""Small models with the fields of published configurations (``tests/model_configs``)."""

from .shrink import shrink as shrink
from .weights import write_small_model as write_small_model
