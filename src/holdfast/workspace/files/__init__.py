"""Files of the workspace, each opened beneath its root.

``root`` opens and protects paths, ``changes`` commits all or nothing, ``tools`` declares read, write, edit and
apply_patch, ``undo`` puts files back.
"""
