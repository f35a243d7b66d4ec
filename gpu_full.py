import msgspec, torch, time, json
from cift_probe.plan import Plan, read_plan, load_model
from cift_probe.measure import sliced
from cift_probe.measure.declare import Task
from cift_probe.measure.inside import allocated_after_cleaning
from dataclasses import dataclass
MiB=1024**2
plans=[read_plan('llama-3.1-8b-qlora'), Plan(name='q15',model='qwen2.5-1.5b',batch_size=2), Plan(name='lora8',model='llama-3.1-8b',method='lora',quantisation='none'), Plan(name='full1',model='llama-3.2-1b',method='full',quantisation='none')]
for p in plans:
    try:
        out=sliced.measure_sliced(Task('gpu0',plan=msgspec.to_builtins(p)))
        d=load_model(p.model).num_hidden_layers
        s=sliced.measure_slice(p,d,Task('gpu0'))
        pk=max(s.instants.values())
        print(p.name,'sliced peak',out['step.peak'].value/MiB,'instant',out['step.peak.instant'].value,'err8',out['step.extrapolation.error'].value,'required',out['step.required'].value/MiB,'t',out['step.seconds'].value,'| truth peak',pk/MiB,max(s.instants,key=s.instants.get),'reserved',s.reserved/MiB,'t',s.step_s, flush=True)
        sl=out['step.slices'].value
        print('  slices', {k:(round(v['reserved']/MiB),round(max(v['instants'].values())/MiB),v['step_s']) for k,v in sl.items()}, {k:round(v/MiB,1) for k,v in s.instants.items()},{k:round(v/MiB,1) for k,v in out['step.peak.instants'].value.items()}, flush=True)
        total=torch.cuda.get_device_properties(0).total_memory
        def runs(cap):
            torch.cuda.set_per_process_memory_fraction(cap/total)
            try: sliced.measure_slice(p,d,Task('gpu0')); return True
            except torch.OutOfMemoryError: return False
            finally: torch.cuda.set_per_process_memory_fraction(1.0); allocated_after_cleaning()
        lo,hi=pk,s.reserved*1.02
        ok=runs(hi)
        while hi-lo>96*MiB:
            mid=(lo+hi)/2
            if runs(mid): hi=mid
            else: lo=mid
        print('  smallest cap',round(lo/MiB),round(hi/MiB),'upper ran',ok,'over peak',hi/pk, flush=True)
    except Exception as e:
        import traceback; traceback.print_exc(); print(p.name,'failed',e,'alloc',allocated_after_cleaning(),flush=True)
