"""The doctor: checks of the installation and of the machine, most of them in child processes.

A group of checks is a file of the folder `checks`, with its checks in `CHECKS`. The README explains the design.
"""

from ._doctor import doctor as doctor
from ._prove import ProofReport as ProofReport
from ._prove import prove as prove
from ._report import DoctorReport as DoctorReport
from ._report import Finding as Finding
