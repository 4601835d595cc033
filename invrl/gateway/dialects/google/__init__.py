"""Google's `generateContent`. Start with `generate_content.py`."""
