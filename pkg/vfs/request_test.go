package vfs

import (
	"context"
	"testing"
)

func TestOwnerOf(t *testing.T) {
	r, _ := newRequest(t)
	derived := context.WithValue(r, otherKey{}, 1)
	for name, tt := range map[string]struct {
		ctx  context.Context
		want Owner
		ok   bool
	}{
		"request":                   {r, Owner{PID: 4711, UID: 4294967294}, true},
		"derived from request":      {derived, Owner{PID: 4711, UID: 4294967294}, true},
		"background":                {background{}, Owner{WriteBack: true}, true},
		"other context":             {context.Background(), Owner{}, false},
		"context with other values": {context.WithValue(context.Background(), otherKey{}, 1), Owner{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got, ok := OwnerOf(tt.ctx); got != tt.want || ok != tt.ok {
				t.Errorf("got %+v, %v, want %+v, %v", got, ok, tt.want, tt.ok)
			}
		})
	}
	if (background{}).Value("other") != nil {
		t.Error("Value of another key: got a value, want nil")
	}
	var ctx context.Context = r
	if n := testing.AllocsPerRun(100, func() { OwnerOf(ctx) }); n != 0 {
		t.Errorf("allocations of OwnerOf: got %v, want 0", n)
	}
}

// otherKey is a context key of another package.
type otherKey struct{}
