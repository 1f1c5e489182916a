package base

import (
	"sync"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A LocalMR is the MR that RegMR returns: memory registered for local use, without a remote key.
type LocalMR struct {
	uses *Uses
	lkey uint32
	once sync.Once
}

// NewLocalMR makes a LocalMR that takes over one use of uses. Dereg drops that use.
func NewLocalMR(uses *Uses, lkey uint32) *LocalMR {
	selfcheck.Track(selfcheck.MR, 1)
	return &LocalMR{uses: uses, lkey: lkey}
}

// LKey returns the local key.
func (m *LocalMR) LKey() uint32 { return m.lkey }

// RKey returns 0: a LocalMR has no remote key.
func (m *LocalMR) RKey() verbs.RKey { return 0 }

// Dereg drops the use of the protection domain, and never fails.
func (m *LocalMR) Dereg() error {
	m.once.Do(func() {
		m.uses.Drop()
		selfcheck.Track(selfcheck.MR, -1)
	})
	return nil
}
