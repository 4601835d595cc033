"""Model families: which Megatron parameter is made of which Hugging Face tensors.

One file per family; `registry.py` lists them. To add a family, write such a file and add its line there;
`parameter.py` has the types that a family is written in.
"""
