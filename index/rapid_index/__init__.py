"""The trajectory knowledge base: keys searched by faiss, values memory-mapped beside them, numpy in and numpy out.

Written once by ``KnowledgeBaseWriter``, read by ``KnowledgeBase``. On disk it is a folder::

    manifest.json     what it holds, which networks made it, sha256 of the other files
    keys.faiss        key z_k of every record, in a faiss index
    values.npy        value x_v of every record, float32 (size, *value_shape)
    labels.npy        label of every record, int64 (size,)

Row i of the three files is record i. This package knows nothing of ``rapid``, torch or images.
"""

from .clustering import cluster_centres
from .errors import CorruptKnowledgeBase, ForeignKnowledgeBase, KnowledgeBaseError
from .gpu import move_to_gpu
from .key_writer import check_index_type
from .keys import Neighbours, load_faiss
from .knowledge_base import KnowledgeBase
from .manifest import Manifest
from .writer import KnowledgeBaseWriter

__all__ = [
    "CorruptKnowledgeBase",
    "ForeignKnowledgeBase",
    "KnowledgeBase",
    "KnowledgeBaseError",
    "KnowledgeBaseWriter",
    "Manifest",
    "Neighbours",
    "check_index_type",
    "cluster_centres",
    "load_faiss",
    "move_to_gpu",
]
