"""Tasks whose right number of heads is known, and a small model that grows on them."""

from meristem.synthetic.experiment import Found, grow
from meristem.synthetic.known_tasks import TASKS, KnownTask
from meristem.synthetic.student import Student

__all__ = ["TASKS", "Found", "KnownTask", "Student", "grow"]
