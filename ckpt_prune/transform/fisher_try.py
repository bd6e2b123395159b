import math, torch
from ckpt_prune.transform.effects import *
from ckpt_prune.transform.effects import _check,_First,_Variants,_batches
from torch.nn import functional
MODE="token"; DRAWS=1

def gradient(readout, batch, states, gen):
    fac=readout.factory
    x=states.to(fac.device,fac.dtype).detach().requires_grad_(True)
    with torch.enable_grad():
        outs=type(readout).outputs.__wrapped__(readout,batch,x)
        loss=0.
        for out in outs:
            if readout.logits:
                B,C=out.shape[0],out.shape[-1]
                flat=out.reshape(-1,C).float()
                P=flat.shape[0]//B
                logp=flat.log_softmax(-1)
                lab=torch.multinomial(logp.detach().exp(),1,generator=gen)
                loss=loss+logp.gather(1,lab).sum()/math.sqrt(P)
            else:
                f=out.float().flatten(1)
                v=torch.randn(f.shape,generator=gen)
                loss=loss+math.sqrt(2)*((v*f).sum(1)/f.detach().norm(dim=1)).sum()
        loss.backward()
    return x.grad.float().cpu()

def measure_effects(model, statistics, samples, *, spaces, device, compute_dtype, points=POINTS, limit=None, allocate=in_memory):
    family, checkpoint = model.family, model.checkpoint
    chosen=[s for s in family.spaces if s in spaces]
    _check(statistics,{SOLVERS[family.spaces[s].ends].collects for s in chosen})
    counts={s:dropped_counts(model.units(s),points) for s in chosen}
    variants=[(s,c) for s,own in counts.items() for c in own]
    if not variants: return {}
    few=_First(samples, LIMITS[family.modality] if limit is None else limit)
    factory=BlockFactory(model,device=device,dtype=compute_dtype)
    stream=HiddenStream(factory,checkpoint.tensors,checkpoint.read,few,allocate=allocate)
    rows=[own for _,own in stream.batches]
    readout=Readout(factory,checkpoint.tensors,checkpoint.read)
    sites=_Variants(model,statistics,device,counts)
    shape,dtype=tuple(stream.states.shape),stream.states.dtype
    ins=[]
    for b in range(model.blocks):
        keep=allocate(shape,dtype); keep.copy_(stream.states); ins.append(keep)
        stream.advance(b,model.read_block(b))
    gens=torch.Generator().manual_seed(0)
    out=stream.states
    grads=[]
    for d in range(DRAWS):
        g=allocate(shape,torch.float32)
        for r in _batches(few,READOUT_TOKENS):
            g[r]=gradient(readout,few.batch(r),out[r],gens)
        grads.append(g)
    found={}
    for b in range(model.blocks-1,-1,-1):
        tensors=model.read_block(b)
        after=ins[b+1] if b+1<model.blocks else out
        vals=[]
        for new in sites.of(b,tensors):
            module=factory.block(b,new); tot=0.
            with torch.no_grad():
                for r in rows:
                    delta=stream.run(module,b,ins[b][r]).float().cpu()-after[r].float()
                    for g in grads:
                        gd=(g[r]*delta).sum(-1).double()  # (B,T)
                        tot+=float(gd.square().sum() if MODE=="token" else gd.sum(1).square().sum())
            vals.append(.5*tot/len(few)/DRAWS)
        for (s,c),v in zip(variants,vals): found.setdefault(model.moments_name(b,s),[]).append((c,v))
        module=factory.block(b,tensors)
        for p in module.parameters(): p.requires_grad_(False)
        for g in grads:
            for r in rows:
                x=ins[b][r].to(device).clone().requires_grad_(True)
                with torch.enable_grad():
                    y=stream.run(module,b,x)
                    y.backward(g[r].to(y))
                g[r]=x.grad.float().cpu()
    return found
