"""Tool calls in the text of a reply: their forms, their parser, and the grammar that
forces one."""
