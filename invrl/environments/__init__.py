"""Environments that invrl starts: each in a process and a virtual environment of its
own, with packages that need not fit ours. They use the HTTP API of any external
environment.

    catalog/NAME/environment.py   an environment: one function, `episode`
    catalog/NAME/requirements.txt its packages, all of them pinned
    catalog/NAME/.python-version  its Python
    environment_folder.py         finds such a folder
    installation.py               makes its virtual environment, asks what it takes
    episode_process.py            starts `episodes.py` in it, also again, and writes its log
    episodes.py                   runs there: leases tasks, plays episodes, posts rewards

`episodes.py` and the catalog import nothing of invrl: `episodes.py` only the standard
library, an environment also its packages.
"""
