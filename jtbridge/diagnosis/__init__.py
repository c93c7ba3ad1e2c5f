"""The doctor: checks of the installation and of the machine, most of them in child processes.

A group of checks is a file of the folder `checks`, with its checks in `CHECKS`. The README explains the design.
"""

from ._doctor import doctor
from ._prove import ProofReport, prove
from ._report import DoctorReport, Finding
