"""What a finished or live run gives away besides its models: its rollouts as rows to
train on.

Start with `export_data.py`.
"""
