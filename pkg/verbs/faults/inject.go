package faults

import (
	"encoding/binary"
	"net"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// errReset is the error of an unexpected end of a connection.
var errReset = &net.OpError{Op: "read", Net: "rdma", Err: syscall.ECONNRESET}

// decide returns the fault for a chain. The faults are tried in the order of their kinds. After one
// fires, the chain does not count as an event of the others.
func (q *queuePair) decide(chain []*verbs.WorkRequest) (injection, bool) {
	if len(chain) == 0 {
		return injection{}, false
	}
	for _, inject := range [...]func(*Provider, []*verbs.WorkRequest) (injection, bool){
		injectDisconnect,
		injectPostFail,
		injectFlushReg,
		injectRegError,
		injectLocalInvError,
	} {
		if c, fired := inject(q.p, chain); fired {
			return c, true
		}
	}
	return injection{}, false
}

// Times of a disconnect, relative to the post.
const (
	momentBefore = iota
	momentMiddle
	momentAfter
	numMoments
)

func injectDisconnect(p *Provider, chain []*verbs.WorkRequest) (injection, bool) {
	n, fires := p.event(disconnectEvery)
	if !fires {
		return injection{}, false
	}
	c := injection{kind: disconnectEvery, event: n, status: verbs.StatusWRFlushErr,
		disconnect: injectedError(disconnectEvery, n, errReset)}
	switch p.plan.choose(disconnectEvery, n, saltVariant, numMoments) {
	case momentBefore:
		c.postErr = verbs.ErrQPState
	case momentMiddle:
		c.at = p.plan.choose(disconnectEvery, n, saltPlace, len(chain))
	case momentAfter:
		c.at = len(chain)
	}
	return c, true
}

func injectPostFail(p *Provider, chain []*verbs.WorkRequest) (injection, bool) {
	at := p.plan.rules[postFail].position
	if at >= len(chain) {
		return injection{}, false
	}
	n, fires := p.event(postFail)
	if !fires {
		return injection{}, false
	}
	if at == anyPosition {
		at = p.plan.choose(postFail, n, saltPlace, len(chain))
	}
	return injection{kind: postFail, event: n, at: at, postErr: injectedError(postFail, n, errNoMemory)}, true
}

// injectFlushReg picks one of the chain's FastRegs. Each chain is one event.
func injectFlushReg(p *Provider, chain []*verbs.WorkRequest) (injection, bool) {
	regs := 0
	for _, wr := range chain {
		if wr.Opcode == verbs.OpFastReg {
			regs++
		}
	}
	if regs == 0 {
		return injection{}, false
	}
	n, fires := p.event(flushReg)
	if !fires {
		return injection{}, false
	}
	c := injection{kind: flushReg, event: n, status: verbs.StatusWRFlushErr,
		disconnect: injectedError(flushReg, n, errReset)}
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

// Statuses that devices return for requests on a memory region.
var (
	regStatuses = [...]verbs.Status{verbs.StatusMWBindErr, verbs.StatusLocProtErr}
	invStatuses = [...]verbs.Status{verbs.StatusLocProtErr, verbs.StatusLocQPOpErr, verbs.StatusMWBindErr}
)

func injectRegError(p *Provider, chain []*verbs.WorkRequest) (injection, bool) {
	return injectOpcodeError(p, chain, regError, verbs.OpFastReg, regStatuses[:])
}

func injectLocalInvError(p *Provider, chain []*verbs.WorkRequest) (injection, bool) {
	return injectOpcodeError(p, chain, linvError, verbs.OpLocalInv, invStatuses[:])
}

// injectOpcodeError picks a request with opcode op. Each of these requests is one event.
func injectOpcodeError(p *Provider, chain []*verbs.WorkRequest, k kind, op verbs.Opcode,
	statuses []verbs.Status) (injection, bool) {
	for i, wr := range chain {
		if wr.Opcode != op {
			continue
		}
		if n, fires := p.event(k); fires {
			status := statuses[p.plan.choose(k, n, saltVariant, len(statuses))]
			return injection{kind: k, event: n, at: i, status: status,
				disconnect: injectedError(k, n, syscall.EIO)}, true
		}
	}
	return injection{}, false
}

// Fields of the fixed part of an RPC-over-RDMA header: XID, version, credits, procedure (RFC 8166
// §4.2).
const (
	rpcrdmaVersOffset   = 4
	rpcrdmaCreditOffset = 8
	rpcrdmaFixedSize    = 16
	rpcrdmaVersion      = 1
)

// limitCredits lowers the credit field of msg if msg has version 1 and more credits.
func limitCredits(p *Provider, msg []byte) {
	r := &p.plan.rules[creditLimit]
	if !r.on || len(msg) < rpcrdmaFixedSize || binary.BigEndian.Uint32(msg[rpcrdmaVersOffset:]) != rpcrdmaVersion {
		return
	}
	field := msg[rpcrdmaCreditOffset:][:4]
	if binary.BigEndian.Uint32(field) <= r.value {
		return
	}
	n, _ := p.event(creditLimit)
	binary.BigEndian.PutUint32(field, r.value)
	p.count(creditLimit, n)
}
