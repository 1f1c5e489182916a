package vfs

import (
	"errors"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/internal/fair"
	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// userRecords is a table of a State whose records belong to users: one user cannot take all of
// them.
type userRecords[T any] struct {
	slotfile.Records[T]
	users *fair.Limit
}

func userRecordsOf[T any](f *slotfile.File, name, what string) userRecords[T] {
	t := slotfile.RecordsOf[T](f, name)
	return userRecords[T]{t, fair.NewLimit(what, t.MaxSlots())}
}

// add stores a record for the user of a credential. The error is EMFILE if the user has its share
// of the table: the kernel gives EMFILE for its own limits per user (inotify_init(2)). It is ENFILE
// if the table is full.
func (t userRecords[T]) add(r *T, cred []byte) (keptSlot, error) {
	uid := sunrpc.CredUID(cred)
	switch err := t.users.Take(uid); {
	case errors.Is(err, fair.ErrShare):
		return 0, syscall.EMFILE
	case err != nil:
		return 0, syscall.ENFILE
	}
	kept, err := t.Add(r, 0)
	if err != nil {
		t.users.Release(uid)
		return 0, syscall.ENFILE
	}
	return kept, nil
}

// remove removes a record of the user of a credential, and sets the reference to 0. It does nothing
// if the reference is 0.
func (t userRecords[T]) remove(ref *keptSlot, cred []byte) {
	if *ref != 0 {
		t.Remove(ref)
		t.users.Release(sunrpc.CredUID(cred))
	}
}

// restored counts a record of an earlier process.
func (t userRecords[T]) restored(cred []byte) { t.users.Add(sunrpc.CredUID(cred), 1) }

// warnOfUsers sets what logs that a user gets no more records.
func (s *State) warnOfUsers(warn warner) {
	if s != nil {
		for _, l := range []*fair.Limit{s.files.users, s.dirs.users, s.hidden.users, s.requestUsers} {
			l.Warn = warn.Warn
		}
	}
}
