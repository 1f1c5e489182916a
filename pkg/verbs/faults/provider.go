package faults

import (
	"context"
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A Provider is another provider with faults. Safe for concurrent use.
type Provider struct {
	inner verbs.Provider
	plan  *Plan
	log   hclog.Logger

	events   [numKinds]atomic.Uint64 // seen
	injected [numKinds]atomic.Uint64 // struck
}

// New decorates inner with the faults of plan. log, which may be nil, is told of the plan as a
// warning and of each fault at debug level.
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

// Name is the inner provider's with "+faults".
func (p *Provider) Name() string { return p.inner.Name() + "+faults" }

// Plan is what the provider was made with.
func (p *Provider) Plan() *Plan { return p.plan }

// A Count tells how often a fault was injected.
type Count struct {
	Name     string
	Injected uint64
}

// Counts lists the faults of the plan, in the order of [All].
func (p *Provider) Counts() []Count {
	var list []Count
	for k := range numKinds {
		if p.plan.rules[k].on {
			list = append(list, Count{Name: k.String(), Injected: p.injected[k].Load()})
		}
	}
	return list
}

// event notes an event of kind k and decides it.
func (p *Provider) event(k kind) (n uint64, strikes bool) {
	if !p.plan.rules[k].on {
		return 0, false
	}
	n = p.events[k].Add(1)
	return n, p.plan.strikes(k, n)
}

// count notes a fault that was injected.
func (p *Provider) count(k kind, event uint64) {
	p.injected[k].Add(1)
	if p.log.IsDebug() {
		p.log.Debug("fault injected", "fault", k.String(), "event", event)
	}
}

// An Error is the error, or the cause of a disconnect, that an injected fault ends in. It unwraps
// to the error that a real device or network would have shown.
type Error struct {
	// Fault is the name as in the plan.
	Fault string
	// Event is the ordinal of the event that was struck, among those that the fault can strike.
	Event uint64
	Err   error
}

func (e *Error) Error() string {
	return fmt.Sprintf("injected fault %s at event %d: %v", e.Fault, e.Event, e.Err)
}

// Unwrap returns the real error's likeness.
func (e *Error) Unwrap() error { return e.Err }

func injectedError(k kind, event uint64, err error) *Error {
	return &Error{Fault: k.String(), Event: event, Err: err}
}

// Resolve is the inner provider's.
func (p *Provider) Resolve(ctx context.Context, raddr netip.AddrPort) (verbs.ActiveID, error) {
	id, err := p.inner.Resolve(ctx, raddr)
	if err != nil {
		return nil, err
	}
	return &activeID{connID: newConnID(p, id), inner: id}, nil
}

// Listen is the inner provider's; the connections accepted have the faults too.
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

// A device hands out decorated protection domains and completion queues.
// It is a value, so that the devices of two connections are equal where the inner ones are.
type device struct {
	p     *Provider
	inner verbs.Device
}

// Attrs are the inner device's, less the room that the decorator needs for requests of its own.
func (d device) Attrs() verbs.DeviceAttrs {
	a := d.inner.Attrs()
	if d.p.plan.attacks() {
		a.MaxQPWR -= attackRoom
		a.MaxCQE -= attackRoom
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

// CreateCQ leaves room for the requests of the decorator on one queue pair.
func (d device) CreateCQ(depth int) (verbs.CQ, error) {
	if depth > 0 && d.p.plan.attacks() {
		depth += attackRoom
	}
	cq, err := d.inner.CreateCQ(depth)
	if err != nil {
		return nil, err
	}
	return &completionQueue{inner: cq}, nil
}
