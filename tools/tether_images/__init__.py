"""Building the images of deploy/Dockerfile, offline where that has to be.

engine   the docker command, and whether an engine runs
base     a base image out of this machine's Python: no registry is asked
wheels   build/wheels: fetched by hash, or packed out of this environment
build    the images themselves
"""
