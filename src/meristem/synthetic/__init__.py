"""Tasks whose right number of heads is known, and a small model that grows on them."""

from meristem.synthetic.run import Outcome, grow
from meristem.synthetic.student import Student
from meristem.synthetic.tasks import TASKS, Task

__all__ = ["TASKS", "Outcome", "Student", "Task", "grow"]
