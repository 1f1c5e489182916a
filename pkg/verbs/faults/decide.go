package faults

import (
	"encoding/binary"
	"net"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// errReset is what the end of a connection that nobody asked for looks like.
var errReset = &net.OpError{Op: "read", Net: "rdma", Err: syscall.ECONNRESET}

// decide draws the faults for a chain, in the order of their kinds; the first that strikes has it,
// and what the others would have seen in it are no events of theirs.
func (q *queuePair) decide(chain []*verbs.WorkRequest) (cut, bool) {
	if len(chain) == 0 {
		return cut{}, false
	}
	for _, f := range [...]func(*Provider, []*verbs.WorkRequest) (cut, bool){cutDisconnect, cutPost, cutFlush,
		cutRegError, cutInvError} {
		if c, struck := f(q.p, chain); struck {
			return c, true
		}
	}
	return cut{}, false
}

// Moments of a disconnect.
const (
	momentBefore = iota
	momentMiddle
	momentAfter
	numMoments
)

func cutDisconnect(p *Provider, chain []*verbs.WorkRequest) (cut, bool) {
	n, strikes := p.event(disconnectEvery)
	if !strikes {
		return cut{}, false
	}
	c := cut{kind: disconnectEvery, event: n, status: verbs.StatusWRFlushErr,
		kill: injectedError(disconnectEvery, n, errReset)}
	switch p.plan.choose(disconnectEvery, n, saltVariant, numMoments) {
	case momentBefore:
		c.refuse = verbs.ErrQPState
	case momentMiddle:
		c.at = p.plan.choose(disconnectEvery, n, saltPlace, len(chain))
	case momentAfter:
		c.at = len(chain)
	}
	return c, true
}

func cutPost(p *Provider, chain []*verbs.WorkRequest) (cut, bool) {
	at := p.plan.rules[postFail].position
	if at >= len(chain) {
		return cut{}, false
	}
	n, strikes := p.event(postFail)
	if !strikes {
		return cut{}, false
	}
	if at == anyPosition {
		at = p.plan.choose(postFail, n, saltPlace, len(chain))
	}
	return cut{kind: postFail, event: n, at: at, refuse: injectedError(postFail, n, errNoMemory)}, true
}

// cutFlush strikes a chain once, at any of its FastRegs.
func cutFlush(p *Provider, chain []*verbs.WorkRequest) (cut, bool) {
	regs := 0
	for _, wr := range chain {
		if wr.Opcode == verbs.OpFastReg {
			regs++
		}
	}
	if regs == 0 {
		return cut{}, false
	}
	n, strikes := p.event(flushReg)
	if !strikes {
		return cut{}, false
	}
	c := cut{kind: flushReg, event: n, status: verbs.StatusWRFlushErr, kill: injectedError(flushReg, n, errReset)}
	for skip := p.plan.choose(flushReg, n, saltPlace, regs); ; c.at++ {
		if chain[c.at].Opcode != verbs.OpFastReg {
			continue
		}
		if skip == 0 {
			return c, true
		}
		skip--
	}
}

// Statuses that devices end requests on a memory region with.
var (
	regStatuses = [...]verbs.Status{verbs.StatusMWBindErr, verbs.StatusLocProtErr}
	invStatuses = [...]verbs.Status{verbs.StatusLocProtErr, verbs.StatusLocQPOpErr, verbs.StatusMWBindErr}
)

func cutRegError(p *Provider, chain []*verbs.WorkRequest) (cut, bool) {
	return cutOpcode(p, chain, regError, verbs.OpFastReg, regStatuses[:])
}

func cutInvError(p *Provider, chain []*verbs.WorkRequest) (cut, bool) {
	return cutOpcode(p, chain, linvError, verbs.OpLocalInv, invStatuses[:])
}

// cutOpcode strikes requests of one opcode: each is an event.
func cutOpcode(p *Provider, chain []*verbs.WorkRequest, k kind, op verbs.Opcode, statuses []verbs.Status) (cut, bool) {
	for i, wr := range chain {
		if wr.Opcode != op {
			continue
		}
		if n, strikes := p.event(k); strikes {
			status := statuses[p.plan.choose(k, n, saltVariant, len(statuses))]
			return cut{kind: k, event: n, at: i, status: status, kill: injectedError(k, n, syscall.EIO)}, true
		}
	}
	return cut{}, false
}

// The fixed part of an RPC-over-RDMA header: XID, version, credits, procedure (RFC 8166 §4.2).
const (
	rpcrdmaVersOffset   = 4
	rpcrdmaCreditOffset = 8
	rpcrdmaFixedSize    = 16
	rpcrdmaVersion      = 1
)

// cutCredits lowers the credit field of msg if it is a message of version 1 that grants more.
func cutCredits(p *Provider, msg []byte) {
	r := &p.plan.rules[creditCut]
	if !r.on || len(msg) < rpcrdmaFixedSize || binary.BigEndian.Uint32(msg[rpcrdmaVersOffset:]) != rpcrdmaVersion {
		return
	}
	field := msg[rpcrdmaCreditOffset:][:4]
	if binary.BigEndian.Uint32(field) <= r.value {
		return
	}
	n, _ := p.event(creditCut)
	binary.BigEndian.PutUint32(field, r.value)
	p.count(creditCut, n)
}
