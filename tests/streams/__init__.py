"""The engine on fake CUDA tensors, without a GPU: is every use of memory ordered after the last?

clocks      what each stream and the host come after; finds what is not ordered
fake_cuda   streams, events and memory of a device that is not there, reported to the clocks
scenarios   what is trained, and how
limits      which waits of the host and which overlap a scenario may have
server      a process per scenario, forked from one that has imported torch
checker     a client of the server
seeded_faults   faults of the engine, which must be found
device.cpp, accelerator.cpp   what torch's CPU build lacks of CUDA
"""
