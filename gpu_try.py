import sys, time, json, traceback, subprocess, os
which=sys.argv[1]
import msgspec
def show(r):
    for k,v in r.items():
        s=msgspec.json.encode(v).decode(); print('   ',k,s[:600],flush=True)
t=time.time()
if which=='facts':
    from cift_probe import sensors
    from cift_probe.facts import nvidia
    with sensors.open_nvml() as n:
        print(n.problem, sensors.read_visible(n)); show(nvidia.read_driver(n))
        show(nvidia.read_device(n, sensors.read_visible(n)[0], 0))
    import torch
    from cift_probe.stack import build
    print(build.read_torch_build(None)); print(build.read_torch_device(None))
    os.system('cat /proc/version; cat /proc/self/cgroup; ls /sys/fs/cgroup | head; df -h /dev/shm /tmp .; nvidia-smi')
else:
    import pkgutil, importlib
    import cift_probe.measure as package
    [importlib.import_module("cift_probe.measure."+m.name) for m in pkgutil.iter_modules(package.__path__) if m.name not in ("bench",)]
    from cift_probe.measure.declare import Task, REGISTRY, FUNCTIONS
    from cift_probe.measure.inside import allocated_after_cleaning
    print('import', time.time()-t)
    from cift_probe.plan import read_plan
    plan=msgspec.to_builtins(read_plan('llama-3.1-8b-qlora'))
    for n in which.split(','):
        for f in ('',*REGISTRY[n].faults) if len(sys.argv)>2 else ('',):
            t=time.time()
            try: r=FUNCTIONS[n](Task('gpu0',fault=f,plan=plan)); print(n,f,round(time.time()-t,2)); show(r)
            except Exception: traceback.print_exc()
            print('   allocated', allocated_after_cleaning(), flush=True)
