"""The policy's model, the schedule that runs rows through it, and its optimizer.

Start with `policy_model.py`.
"""
