"""The only floor where a process is started or killed: compile workers and the GPU worker.

Parent and child speak JSON, one message a line, over the child's standard streams. Cubins go by path; nothing is
pickled. A child names the stage it enters before it enters it, so that its death is blamed on the stage.
"""
