package sunrpc

import "context"

// A CallID identifies a call that an earlier process of this client may have made. Servers
// recognize a repeated call by its XID and its arguments.
type CallID struct {
	Conn uint32 // index of the transport in its mount
	XID  uint32
}

// A CallKeeper is the context of a call whose effects must happen once. It keeps the ID of the
// call, so that the next process of this client can repeat the call with the same ID. The duplicate
// request cache of the server then answers, and the server does not execute the call again.
//
// The type of the context itself implements CallKeeper. A context that is derived from it does not.
type CallKeeper interface {
	// KeptCall returns the ID under which an earlier process made this call: the same procedure
	// with the same arguments. ok is false for a call that is new, or that needs no ID. KeptCall is
	// called once for each call, before the call gets a slot.
	KeptCall(m *Message) (id CallID, ok bool)
	// KeepCall receives the ID of the call before its first transmission. KeepCall is called for
	// every call with a CallKeeper. It is not called again if the transport sends the call again.
	KeepCall(m *Message, id CallID)
}

// KeptCall returns the result of KeptCall of ctx, or false if ctx is no CallKeeper.
func KeptCall(ctx context.Context, m *Message) (id CallID, ok bool) {
	if k, is := ctx.(CallKeeper); is {
		return k.KeptCall(m)
	}
	return CallID{}, false
}

// KeepCall calls KeepCall of ctx if ctx is a CallKeeper.
func KeepCall(ctx context.Context, m *Message, id CallID) {
	if k, is := ctx.(CallKeeper); is {
		k.KeepCall(m, id)
	}
}
