package nlm

import (
	"context"
	"net"
	"net/netip"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/fair"
	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// OwnersHead is the length of the header of a file of owners.
const OwnersHead = ownersHead

// Quick makes a client that New returns poll and retry within milliseconds, also while it restores
// locks. The client connects with dial, if that is not nil.
func (c *Config) Quick(dial func(ctx context.Context, addr string) (net.Conn, error)) {
	c.times = func(c *Client) {
		c.times.silent = pollTimes{time.Millisecond, time.Millisecond}
		c.times.grace, c.times.settle = time.Millisecond, time.Millisecond
		c.link.times.minBackoff, c.link.times.maxBackoff = time.Millisecond, 10*time.Millisecond
		c.link.times.noService = 30 * time.Millisecond
		c.link.times.connect, c.link.times.reply = time.Minute, time.Minute
		if dial != nil {
			c.link.dial = dial
		}
	}
}

// Small makes a client that New returns allow fewer locks and requests that wait.
func (c *Config) Small(locks, waiting int) {
	times := c.times
	c.times = func(c *Client) {
		times(c)
		c.locks, c.waiting = fair.NewLimit("locks", locks), fair.NewLimit("waiting", waiting)
		c.locks.Warn, c.waiting.Warn = c.warn, c.warn
	}
}

// Attempts returns how often requests to lock looked whether they can get their lock.
func (c *Client) Attempts() uint64 { return c.attempts.Load() }

// WaitRestored returns when the restored locks are reclaimed and the requests of the earlier
// process are settled.
func (c *Client) WaitRestored() { c.restoring.Wait() }

// Table returns the locks of a file, held and lost ones.
func (c *Client) Table(fh nfs3.FH) (held, lost []Lock) {
	f := c.getFile(fh)
	defer c.putFile(f)
	_ = f.acquire(context.Background())
	defer f.release()
	return f.locks.All(), f.lost.All()
}

// Identity returns what names an owner at the server. The owner must have locks.
func (c *Client) Identity(id Owner) (svid uint32, oh []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if o := c.mu.owners[id]; o != nil {
		return o.svid, o.oh
	}
	return 0, nil
}

// Records returns the number of records of the State: owners, ranges, and those of requests.
func (s *State) Records() (owners, ranges, requests int) {
	_ = s.ranges.All(func(_ slotfile.Ref, r *rangeRecord) error {
		if r.kind.intent() {
			requests++
		}
		return nil
	})
	return s.owners.Len(), s.ranges.Len(), requests
}

// Patient makes the client poll only when it is called back.
func (c *Client) Patient() {
	c.times.silent = pollTimes{time.Hour, time.Hour}
	c.times.called = c.times.silent
}

// SetPortmap makes the service use another port mapper.
func (c *ServiceConfig) SetPortmap(port int) { c.portmapPort = port }

// SetRetry makes the service retry the release of locks sooner.
func (c *ServiceConfig) SetRetry(d time.Duration) { c.staleRetry = d }

// Handle executes one call as if it came from the address.
func (s *Service) Handle(from netip.AddrPort, message []byte) []byte { return s.handle(from, message) }

// Admit adds a connection from the peer, or returns false.
func (s *Service) Admit(conn net.Conn, peer netip.Addr) bool { return s.admit(conn, peer) }

// WaitReady returns when the service has started.
func (s *Service) WaitReady() { <-s.ready }

// Active reports whether servers can call the service.
func (s *Service) Active() bool { return s.state().callbacks }

// AppendNotify appends the arguments of SM_NOTIFY.
func AppendNotify(b []byte, host string, state uint32) []byte {
	return sunrpc.AppendUint32(sunrpc.AppendString(b, host), state)
}

// SetServerMapper makes the client ask another port mapper for the status monitor of the server.
func (c *Config) SetServerMapper(port int) {
	times := c.times
	c.times = func(c *Client) {
		times(c)
		c.mapper = port
	}
}

// KnowsState reports whether the client knows the state number of the server.
func (c *Client) KnowsState() bool { return c.knownState().known }
