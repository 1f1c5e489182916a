package faults

import (
	"context"
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A Provider decorates another provider with faults. A Provider is safe for concurrent use.
type Provider struct {
	inner verbs.Provider
	plan  *Plan
	log   hclog.Logger

	events   [numKinds]atomic.Uint64 // events so far
	injected [numKinds]atomic.Uint64 // injected faults
}

// New decorates inner with the faults of plan. New logs a warning with the plan, and each fault at
// debug level. log may be nil.
func New(inner verbs.Provider, plan *Plan, log hclog.Logger) *Provider {
	if log == nil {
		log = hclog.NewNullLogger()
	}
	if !plan.Empty() {
		log.Warn("FAULT INJECTION IS ON: connections are broken on purpose", "plan", plan.String(), "provider",
			inner.Name())
	}
	return &Provider{inner: inner, plan: plan, log: log}
}

// Name returns the inner provider's name with "+faults".
func (p *Provider) Name() string { return p.inner.Name() + "+faults" }

// Plan returns the provider's plan.
func (p *Provider) Plan() *Plan { return p.plan }

// A Count is the number of times that a fault was injected.
type Count struct {
	Name     string
	Injected uint64
}

// Counts returns the counts of the plan's faults, in the order of [All].
func (p *Provider) Counts() []Count {
	var list []Count
	for k := range numKinds {
		if p.plan.rules[k].on {
			list = append(list, Count{Name: k.String(), Injected: p.injected[k].Load()})
		}
	}
	return list
}

// event counts an event of kind k and reports whether the fault fires.
func (p *Provider) event(k kind) (n uint64, fires bool) {
	if !p.plan.rules[k].on {
		return 0, false
	}
	n = p.events[k].Add(1)
	return n, p.plan.fires(k, n)
}

// count counts and logs an injected fault.
func (p *Provider) count(k kind, event uint64) {
	p.injected[k].Add(1)
	if p.log.IsDebug() {
		p.log.Debug("fault injected", "fault", k.String(), "event", event)
	}
}

// An Error is the error, or the cause of a disconnect, of an injected fault. An Error unwraps to
// the error that a real device or network would return.
type Error struct {
	// Fault is the fault's name in the plan.
	Fault string
	// Event is the number of the event, counted from 1 over the events of this fault.
	Event uint64
	Err   error
}

func (e *Error) Error() string {
	return fmt.Sprintf("injected fault %s at event %d: %v", e.Fault, e.Event, e.Err)
}

// Unwrap returns the error that a real device or network would return.
func (e *Error) Unwrap() error { return e.Err }

func injectedError(k kind, event uint64, err error) *Error {
	return &Error{Fault: k.String(), Event: event, Err: err}
}

// Resolve calls the inner provider and decorates the result.
func (p *Provider) Resolve(ctx context.Context, raddr netip.AddrPort) (verbs.ActiveID, error) {
	id, err := p.inner.Resolve(ctx, raddr)
	if err != nil {
		return nil, err
	}
	return &activeID{connID: newConnID(p, id), inner: id}, nil
}

// Listen calls the inner provider. Accepted connections are decorated too.
func (p *Provider) Listen(ctx context.Context, laddr netip.AddrPort) (verbs.Listener, error) {
	l, err := p.inner.Listen(ctx, laddr)
	if err != nil {
		return nil, err
	}
	return &listener{Listener: l, p: p}, nil
}

type listener struct {
	verbs.Listener
	p *Provider
}

func (l *listener) Accept(ctx context.Context) (verbs.ConnRequest, error) {
	req, err := l.Listener.Accept(ctx)
	if err != nil {
		return nil, err
	}
	return &connRequest{connID: newConnID(l.p, req), inner: req}, nil
}

// A device creates decorated protection domains and completion queues. device is a value type, so
// that the devices of two connections are equal if the inner devices are equal.
type device struct {
	p     *Provider
	inner verbs.Device
}

// Attrs returns the inner device's attributes, reduced by the entries that attacks need.
func (d device) Attrs() verbs.DeviceAttrs {
	a := d.inner.Attrs()
	if d.p.plan.attacks() {
		a.MaxQPWR -= maxAttacks
		a.MaxCQE -= maxAttacks
	}
	return a
}

func (d device) AllocPD() (verbs.PD, error) {
	pd, err := d.inner.AllocPD()
	if err != nil {
		return nil, err
	}
	return &protectionDomain{p: d.p, inner: pd, orphans: make(map[*memoryRegion]struct{})}, nil
}

// CreateCQ adds entries for the attacks of one queue pair.
func (d device) CreateCQ(depth int) (verbs.CQ, error) {
	if depth > 0 && d.p.plan.attacks() {
		depth += maxAttacks
	}
	cq, err := d.inner.CreateCQ(depth)
	if err != nil {
		return nil, err
	}
	return &completionQueue{inner: cq}, nil
}
