"""The lab: real systemd hosts on this machine, to try deploys on and to break on purpose.

names    what a lab and its hosts are called: directories, links, namespaces, addresses (pure)
system   this machine: run a bounded command, ask for packages, find a cgroup2 tree
root     what the hosts are made of: the Debian base root and the disk every host starts from
machine  one host: boot, kill, cut, freeze, fill
lab      several hosts under one name: up, down, status, the inventory for them
owned    labs of a test run or a demonstration, which must not outlive it
guest/   files that go into the hosts: a stand-in ``nvidia-smi``, model configurations
standin/ the server that stands in for SGLang there
"""
