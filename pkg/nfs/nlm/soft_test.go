package nlm_test

import (
	"bytes"
	"context"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// invalidReplies are replies that do not end a request.
var invalidReplies = map[string]func(*call) reply{
	"grace period without end": func(c *call) reply { return c.stat(nlmwire.DeniedGracePeriod) },
	"invalid status":           func(c *call) reply { return c.stat(nlmwire.Failed + 1) },
	"no results":               func(c *call) reply { return c.accepted(sunrpc.Success) },
	"system error":             func(c *call) reply { return c.accepted(sunrpc.SystemErr) },
	"service is gone":          func(c *call) reply { return c.accepted(sunrpc.ProgUnavail) },
	"not a reply":              func(*call) reply { return reply("garbage") },
	"another XID":              func(c *call) reply { c.XID++; return c.stat(nlmwire.Granted) },
	"end of the connection":    func(*call) reply { return drop },
}

// TestSoftRequestsEnd makes each request of a soft mount to a server with such replies. The timeout
// of the mount bounds each wait for the server.
func TestSoftRequestsEnd(t *testing.T) {
	const giveUp = time.Second
	for name, answer := range invalidReplies {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, s *lockServer) {
				c := s.client(func(cfg *nlm.Config) { cfg.GiveUp, cfg.GiveUpErr = giveUp, syscall.ETIMEDOUT })
				carol := nlm.Owner{Kind: nlm.Flock, ID: 3}
				mustLock(t, c, exclusive(alice, 0, 9))
				waiting, cancel := goLock(t, c, exclusive(carol, 0, 0), true) // for the lock of alice
				defer cancel()
				synctest.Wait()
				s.setAnswer(answer)
				defer s.setAnswer(nil)
				for _, x := range []struct {
					name string
					do   func(ctx context.Context) error
				}{
					{"lock", func(ctx context.Context) error {
						return c.Lock(ctx, cred, fh, exclusive(bob, 20, 29), false)
					}},
					{"waiting lock", func(ctx context.Context) error {
						return c.Lock(ctx, cred, fh, exclusive(bob, 20, 29), true)
					}},
					{"test", func(ctx context.Context) error {
						_, _, err := c.Test(ctx, cred, fh, exclusive(bob, 20, 29))
						return err
					}},
					{"unlock", func(ctx context.Context) error { return c.Unlock(ctx, cred, fh, alice, 5, 9) }},
					{"close", func(ctx context.Context) error { return c.ReleaseOpen(ctx, fh, alice.ID) }},
					{"lock that the close did not release", func(ctx context.Context) error {
						select {
						case err := <-waiting:
							return err
						case <-ctx.Done():
							return ctx.Err()
						}
					}},
				} {
					began := time.Now()
					ctx, cancel := context.WithTimeout(t.Context(), 10*giveUp)
					err := x.do(ctx)
					if took := time.Since(began); took > 2*giveUp+giveUp/4 {
						t.Errorf("%s: got error %v after %v, want the end within %v", x.name, err, took, 2*giveUp)
					}
					cancel()
				}
			})
		})
	}
}

// TestMessagesOfServerAreLimited checks that a server cannot fill the log with lost locks and
// failed unlocks.
func TestMessagesOfServerAreLimited(t *testing.T) {
	const n = 50
	bubble(t, func(t *testing.T, s *lockServer) {
		var out bytes.Buffer
		c := s.client(func(cfg *nlm.Config) { cfg.Logger = hclog.New(&hclog.LoggerOptions{Output: &out}) })
		fail := func() {
			s.answerStat(nlmwire.ProcUnlock, nlmwire.Failed)
			for i := range uint64(n) {
				mustLock(t, c, exclusive(alice, 2*i, 2*i))
				mustUnlock(t, c, alice, 2*i, 2*i)
				mustLock(t, c, exclusive(bob, 2*i+1, 2*i+1))
			}
			s.setAnswer(func(c *call) reply { return c.stat(nlmwire.Failed) })
			s.dropConnections()
			kit.Eventually(t, "lost locks", func() bool { return c.Counters.Held.Load() == 0 })
			release(t, c, bob)
		}
		fail()
		s.restart(0)
		time.Sleep(time.Minute)
		fail()
		synctest.Wait()
		for _, message := range []string{"unlock failed", "lock lost"} {
			if got := strings.Count(out.String(), message); got != 2 {
				t.Errorf("messages %q: got %d, want 2", message, got)
			}
		}
		if got := strings.Count(out.String(), "omitted="); got != 2 {
			t.Errorf("messages with the number of those left out: got %d, want 2", got)
		}
	})
}
