package integration

// knownDifferences are outcomes that differ because NFSv3, or every client of it, cannot do what a
// local file system does. A difference that this server or this client can avoid does not belong
// here.
var knownDifferences = []difference{
	{"fallocate", "a fallocate f keep 0 10000 => ENOTSUP", "NFSv3 has no procedure that allocates space"},
	{"extended attributes", "a setxattr f user.test value => ENOTSUP", "NFSv3 has no extended attributes"},
	{"exchange", "a renameat2 f g exchange => EINVAL", "RENAME of NFSv3 has no flags"},
	{"times before 1970", "a times f => atime=0.000000000 mtime=0.000000000", "nfstime3 holds seconds as an unsigned integer (RFC 1813 §2.5)"},
	{"rmdir of an open directory", "a fstat d => ESTALE", "RMDIR removes the object of a handle that another process has open"},
	{"create in a directory that cannot be searched", "a ls d => ../0 ./0", noSearch},
	{"search permission", "a ls d => ../0 ./0 e/0 f/0", noSearch},
	{"search permission", "b ls d => ../0 ./0 e/0 f/0", noSearch},
	{"readdir by others", "b ls d => ../0 ./0 f/0", noSearch},
}

const noSearch = "READDIRPLUS returns no attributes to a caller who may not search the directory, as Linux's server does; the type is then DT_UNKNOWN"
