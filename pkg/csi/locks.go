package csi

import (
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// volumeLocks allows one call at a time for each volume.
type volumeLocks struct {
	mu   sync.Mutex
	busy map[string]struct{} // by volume ID
}

// acquire marks a volume as busy until release is called. It does not wait: CSI, section
// "Concurrency", wants ABORTED while another call for the volume is in progress.
func (l *volumeLocks) acquire(id string) (release func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, busy := l.busy[id]; busy {
		return nil, status.Errorf(codes.Aborted, "volume %s: another operation is in progress; try again later",
			brief(id))
	}
	if l.busy == nil {
		l.busy = make(map[string]struct{})
	}
	l.busy[id] = struct{}{}
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.busy, id)
	}, nil
}
