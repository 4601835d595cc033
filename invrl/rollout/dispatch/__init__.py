"""What is rolled out when: the dispatcher, evaluations and external environments.

Start with `dispatcher.py`.
"""
