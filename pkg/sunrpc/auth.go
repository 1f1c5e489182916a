package sunrpc

// Limits of an AUTH_SYS credential (RFC 5531 appendix A).
const (
	MaxMachineName = 255
	MaxGIDs        = 16
)

// AuthNoneSize is the size in bytes of the encoded AUTH_NONE credential.
const AuthNoneSize = 2 * SizeUint32

// AuthSys is the body of an AUTH_SYS credential (RFC 5531 appendix A, authsys_parms).
type AuthSys struct {
	Stamp    uint32
	Machine  string // at most 255 bytes
	UID, GID uint32
	GIDs     []uint32 // at most 16
}

// AppendAuthSys appends the credential: flavor, length of the body, body. It truncates the machine
// name to 255 bytes and the list of groups to 16.
func AppendAuthSys(b []byte, a *AuthSys) []byte {
	machine, gids := a.Machine, a.GIDs
	if len(machine) > MaxMachineName {
		machine = machine[:MaxMachineName]
	}
	if len(gids) > MaxGIDs {
		gids = gids[:MaxGIDs]
	}
	size := SizeUint32 + SizeUint32 + Pad4(len(machine)) + 2*SizeUint32 + SizeUint32 + SizeUint32*len(gids)
	b = AppendUint32(b, FlavorSys)
	b = AppendUint32(b, uint32(size))
	b = AppendUint32(b, a.Stamp)
	b = AppendString(b, machine)
	b = AppendUint32(b, a.UID)
	b = AppendUint32(b, a.GID)
	b = AppendUint32(b, uint32(len(gids)))
	for _, g := range gids {
		b = AppendUint32(b, g)
	}
	return b
}

// Nobody is the uid of a credential that names no user.
const Nobody = 65534

// CredUID returns the uid in an encoded AUTH_SYS credential, or Nobody for another one.
func CredUID(cred []byte) (uid uint32) {
	d := NewDecoder(cred)
	return AuthUID(d.auth())
}

// AuthUID is CredUID for the flavor and the body of a credential.
func AuthUID(flavor uint32, body []byte) (uid uint32) {
	d := NewDecoder(body)
	d.Uint32() // stamp
	d.Opaque(MaxMachineName)
	if uid = d.Uint32(); flavor != FlavorSys || d.err != nil {
		return Nobody
	}
	return uid
}

// AppendAuthNone appends the AUTH_NONE credential or verifier: flavor 0 and an empty body (RFC 5531
// §10.1).
func AppendAuthNone(b []byte) []byte {
	return AppendUint32(AppendUint32(b, FlavorNone), 0)
}
